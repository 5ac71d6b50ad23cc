"""Pictures in the report: everything in its place, and masks that are what NumPy says."""

from __future__ import annotations

import itertools
import pathlib
import re

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onnx_attnfuse
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.report.pictures.model import Arrow, Box, Drawing, Layout, MaskPicture, lay_out, strokes
from onnx_attnfuse.report.pictures.site_graph import surroundings
from tests.support.bundled import BUNDLED, name_of
from tests.support.small_models import ATTENTION, parsed

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_no_box_hides_another_and_arrows_touch_what_they_connect(path: pathlib.Path) -> None:
    pictures = set(onnx_attnfuse.explain(path, pictures=True, verify="none", ep="cuda").pictures)
    assert pictures
    for picture in pictures:
        assert picture is not None
        for drawing in (picture.before, picture.after):
            assert drawing is not None
            check(drawing, lay_out(drawing))


def check(drawing: Drawing, layout: Layout) -> None:
    """Asserts what a reader takes for granted."""
    assert sorted(map(id, drawing.boxes)) == sorted(id(placed.box) for placed in layout.boxes)
    for placed in layout.boxes:
        assert 0 <= placed.x <= placed.x + placed.width <= layout.width
        assert 0 <= placed.y <= placed.y + placed.height <= layout.height
    for one, other in itertools.combinations(layout.boxes, 2):
        beside = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert beside or one.y + one.height <= other.y or other.y + other.height <= one.y, (one.box, other.box)
    places = {id(placed.box): placed for placed in layout.boxes}
    ends = np.array([ends_of(arrow.path) for arrow in layout.arrows])
    assert len(ends) == len(drawing.arrows)
    for arrow in drawing.arrows:
        tail, head = (places[id(drawing.boxes[place])] for place in (arrow.tail, arrow.head))
        assert tail.y < head.y
        wanted = (tail.x + tail.width / 2, tail.y + tail.height, head.x + head.width / 2, head.y)
        assert np.isclose(ends, wanted, atol=1).all(axis=1).any()


def ends_of(path: str) -> tuple[float, ...]:
    """Where a path of V and C commands starts and ends."""
    x, y = (float(number) for number in _NUMBER.findall(path)[:2])
    start = x, y
    for command, numbers in re.findall(r"([VC])([^VC]*)", path):
        found = [float(number) for number in _NUMBER.findall(numbers)]
        x, y = (x, found[0]) if command == "V" else (found[-2], found[-1])
    return (*start, x, y)


def test_parts_that_nothing_connects_stand_side_by_side() -> None:
    drawing = Drawing((Box("a"), Box("b"), Box("c")), (Arrow(0, 1),))
    check(drawing, lay_out(drawing))


@given(st.lists(st.text("o.1a", min_size=5, max_size=5), min_size=1, max_size=6))
def test_strokes_fill_every_cell_once(rows: list[str]) -> None:
    painted = np.full((len(rows), 5), " ")
    for letter, path in strokes(tuple(rows)).items():
        for start, row, count in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            cells = painted[int(row), int(start) : int(start) + int(count)]
            assert len(cells) == int(count)
            assert (cells == " ").all()
            cells[:] = letter
    assert ["".join(row) for row in painted] == rows


FUSED = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
fused (float[b, s, 8] x) => (float[b, s, 8] y)
<float[8, 8] w = {WEIGHTS}>
{
    [projection] q = MatMul(x, w)
    [attention] out = com.microsoft.MultiHeadAttention<num_heads = 2>(q, x, x)
    [end] y = Relu(out)
}"""


def test_an_operator_that_is_not_read_is_drawn_with_what_is_next_to_it() -> None:
    text = FUSED.replace("WEIGHTS", ",".join(["1"] * 64))
    (picture,) = onnx_attnfuse.explain(parsed(text), pictures=True).pictures
    assert picture is not None
    assert picture.before is not None
    assert [(box.name, box.kind) for box in sorted(picture.before.boxes, key=lambda box: box.name)] == [
        ("attention", "fused"),
        ("end", "node"),
        ("projection", "node"),
        ("x", "operand"),
        ("x", "operand"),
        ("y", "result"),
    ]
    assert picture.after is None


ROTATED = """<ir_version: 9, opset_import: ["" : 23, "com.microsoft" : 1, "com.example" : 1]>
rotated (float[b, s, 8] x, int64[b, s] i, float[s, 4] c, float[s, 4] d) => (float[b, s, 8] y) {
    z = ROTATION
    y = com.microsoft.MultiHeadAttention<num_heads = 1>(z, z, z)
}"""


@pytest.mark.parametrize(
    ("rotation", "expected"),
    [
        ("RotaryEmbedding<num_heads = 1>(x, c, d, i)", {"x": "input", "c": "cos cache", "d": "sin cache", "i": "position ids"}),
        ("com.microsoft.RotaryEmbedding(x, i, c, d)", {"x": "input", "c": "cos cache", "d": "sin cache", "i": "position ids"}),
        ("com.example.RotaryEmbedding(x, i, c, d)", {"x": "input", "c": "input", "d": "input"}),
    ],
)
def test_inputs_are_called_what_their_own_operator_calls_them(rotation: str, expected: dict[str, str]) -> None:
    graph = ir.from_onnx_text(ROTATED.replace("ROTATION", rotation)).graph
    drawing = surroundings(graph[1], Facts(graph), fused=True)
    assert drawing is not None
    assert {box.name: box.title for box in drawing.boxes if box.kind == "operand"} == expected


MASKED = ATTENTION.replace("float[b, 2, t, 4] v)", "float[b, 2, t, 4] v, MASK mask)").replace(
    "Softmax<axis = -1>(scaled)", "Softmax<axis = -1>(masked)"
)


def masked(kind: str, nodes: str, **constants: str) -> MaskPicture | None:
    """The picture of the mask of an attention with `nodes` between scores and softmax."""
    text = MASKED.replace("MASK", kind).replace("[softmax]", f"{nodes}\n    [softmax]")
    declared = "".join(f", {declaration} = {{{content}}}" for declaration, content in constants.items())
    text = text.replace("<float scale = {0.5}>", f"<float scale = {{0.5}}, float low = {{-10000}}{declared}>")
    (picture,) = onnx_attnfuse.explain(parsed(text), pictures=True).pictures
    assert picture is not None
    return picture.mask


def seen(cells: tuple[str, ...]) -> np.ndarray:
    return np.array([[letter != "." for letter in row] for row in cells])


def test_padding_is_drawn_for_a_batch_without_and_with_it_on_either_side() -> None:
    found = masked("bool[b, 1, 1, t]", "[masking] masked = Where(mask, scaled, low)")
    assert found is not None
    assert [panel.title for panel in found.panels] == ["no padding", "padded on the right", "padded on the left"]
    everything, right, left = (seen(panel.cells) for panel in found.panels)
    keys = everything.shape[1]
    assert everything.all()
    assert (right == (np.arange(keys) < keys - 3)).all()
    assert (left == (np.arange(keys) >= 3)).all()
    assert found.legend == ((".", "not seen"), ("o", "seen"))


def test_a_bias_shows_by_sign_and_amount() -> None:
    table = ",".join(str(number) for number in (0, 1, -2, 4))
    text = ATTENTION.replace("[b, 2, s, 4]", "[b, 2, 2, 4]").replace("[b, 2, t, 4]", "[b, 2, 2, 4]")
    text = text.replace("<float scale = {0.5}>", f"<float scale = {{0.5}}, float[1, 1, 2, 2] table = {{{table}}}>")
    text = text.replace(
        "[softmax] weights = Softmax<axis = -1>(scaled)",
        "[add] sum = Add(scaled, table)\n [softmax] weights = Softmax<axis = -1>(sum)",
    )
    (picture,) = onnx_attnfuse.explain(parsed(text), pictures=True).pictures
    assert picture is not None
    assert picture.mask is not None
    (panel,) = picture.mask.panels
    assert panel.title == "every batch entry"
    assert panel.cells == ("o1", "b4")


def test_where_there_is_no_mask_there_is_no_picture_of_one() -> None:
    (picture,) = onnx_attnfuse.explain(parsed(ATTENTION), pictures=True).pictures
    assert picture is not None
    assert picture.mask is None


@pytest.mark.parametrize("name", ["gpt2__ts17__eager", "whisper_decoder__dyn18__sdpa"])
def test_a_causal_decoder(name: str) -> None:
    path = next(path for path in BUNDLED if name in path.name)
    report = onnx_attnfuse.explain(path, pictures=True)
    for site, picture in zip(report.sites, report.pictures, strict=True):
        assert picture is not None
        if site.mask is None or not site.mask.startswith(("causal", "padding_causal")):
            continue
        assert picture.mask is not None
        first = seen(picture.mask.panels[0].cells)
        assert (first == np.tri(*first.shape, dtype=bool)).all()
        break
    else:
        pytest.fail("there is no causal attention in it")


def test_a_cache_shifts_the_triangle() -> None:
    path = next(path for path in BUNDLED if "llama_past" in path.name)
    picture = onnx_attnfuse.explain(path, pictures=True).pictures[0]
    assert picture is not None
    assert picture.mask is not None
    first = seen(picture.mask.panels[0].cells)
    rows, keys = first.shape
    assert keys > rows
    assert (first == np.tri(rows, keys, keys - rows, dtype=bool)).all()
