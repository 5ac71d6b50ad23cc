"""Every fact is true: what is inferred without running a graph is compared with what a run of it gives."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Content, Scalar
from onnx_attnfuse.graph.sizes import Dim, Size
from tests.support.bundled import BUNDLED, Array, cases, name_of, run, with_outputs


class Recorded:
    """One run of a model, and what each symbol was in it."""

    def __init__(self, model: ir.Model, facts: Facts, arrays: dict[str, Array]) -> None:
        self.facts = facts
        self.arrays = arrays
        self.values = [value for value in model.graph.inputs if value.name in arrays]
        self.values += [value for node in model.graph for value in node.outputs if value.name in arrays]
        self.symbols = {
            name: arrays[value.name].shape[axis] for name, (value, axis) in facts.origins.items() if value.name in arrays
        }

    def number(self, item: Dim | Scalar) -> float:
        """What an inferred size or number was in this run."""
        return sizes.evaluate(item, self.symbols) if isinstance(item, Size) else float(item or 0)

    def wrong_dims(self) -> list[str]:
        """Values whose shape is not the inferred one."""
        wrong: list[str] = []
        for value in self.values:
            dims = self.facts.dims(value)
            array = self.arrays[value.name or ""]
            if dims is not None and tuple(map(self.number, dims)) != array.shape:
                wrong.append(f"{value.name}: inferred {dims}, got {array.shape}")
        return wrong

    def wrong_types(self) -> list[str]:
        """Values whose element type is not the inferred one."""
        wrong: list[str] = []
        for value in self.values:
            dtype, array = self.facts.dtype(value), self.arrays[value.name or ""]
            if dtype is not None and dtype.numpy() != array.dtype:
                wrong.append(f"{value.name}: inferred {dtype}, got {array.dtype}")
        return wrong

    def wrong_contents(self) -> list[str]:
        """Values whose elements are not the inferred ones."""
        wrong: list[str] = []
        for value in self.values:
            content, array = self.facts.content(value), self.arrays[value.name or ""]
            if content is not None and not self._is(content, array):
                wrong.append(f"{value.name}: inferred {content}, got {array}")
        return wrong

    def _is(self, content: Content, array: Array) -> bool:
        items = content if isinstance(content, tuple) else (content,)
        if array.ndim != isinstance(content, tuple) or array.size != len(items):
            return False
        known = [(self.number(item), element) for item, element in zip(items, array.flat, strict=True) if item is not None]
        return all(np.isclose(number, element) for number, element in known)


def recorded(path: pathlib.Path, case: str) -> Recorded:
    proto = onnx.load(path)
    names = [name for node in proto.graph.node for name in node.output if name]
    feeds = cases(path)[case]
    arrays = run(with_outputs(proto, names), feeds) | feeds
    model = ir.from_proto(proto)
    return Recorded(model, Facts(model.graph), arrays)


EVERY_CASE = [
    pytest.param(path, case, id=f"{name_of(path)}-{case}")
    for path in BUNDLED
    for case in cases(path)
    if case in {"example", "resized", "step"}
]


@pytest.mark.parametrize(("path", "case"), EVERY_CASE)
def test_every_fact_about_a_bundled_model_is_true(path: pathlib.Path, case: str) -> None:
    found = recorded(path, case)
    assert not found.wrong_dims()
    assert not found.wrong_types()
    assert not found.wrong_contents()


HEADER = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
operators (float[a, b, 4] x, float[a, 1, 4] y, float[4, c] m, float[a, 6, b, b] image, int64[2] picks, int64[a, b, 1] where)
    => (z)
<float[5, 6, 3, 3] kernel = {%s}, float[6, 2, 2, 2] upwards = {%s}, int64 one = {1}, int64 two = {2}, int64[1] zero = {0},
 int64[1] last = {-1}, int64[1] three = {3}, int64[2] ends = {-1, 1}, int64[2] pair = {2, 2}, int64[4] pads = {0, 1, 2, 0},
 int64[6] all_pads = {0, 1, 0, 0, 2, 3}, int64[1] far = {9223372036854775807}, int64[2] lengths = {1, 3}, float half = {0.5},
 int64[3] merged = {0, -1, 2}, int64[4] wide = {2, 1, 1, 4}, int64[3] twice = {1, 2, 1}, int64 minus = {-7}>
{
    %s
}"""
LINES = [
    line
    for line in pathlib.Path(__file__).with_name("operators.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
RUNS = [{"a": 2, "b": 4, "c": 3}, {"a": 1, "b": 2, "c": 5}]


def model_of(line: str) -> onnx.ModelProto:
    """The operators of a line, written last one first, as a model that gives out `z`."""
    body = "\n    ".join(reversed(line.split("; ")))
    numbers = [", ".join(["0.1"] * count) for count in (5 * 6 * 9, 6 * 2 * 4)]
    text = HEADER % (*numbers, body)
    return onnx.parser.parse_model(text.replace("(z)", "(float z)"))


@pytest.mark.parametrize("line", LINES, ids=str)
def test_every_fact_about_an_operator_is_true(line: str) -> None:
    proto = model_of(line)
    proto.graph.output[0].ClearField("type")
    random = np.random.default_rng(0)
    names = [name for node in proto.graph.node for name in node.output if name]
    model = ir.from_proto(proto)
    for sizes_of_run in RUNS:
        feeds: dict[str, Array] = {}
        for entry in proto.graph.input:
            shape = [sizes_of_run.get(dim.dim_param, dim.dim_value) for dim in entry.type.tensor_type.shape.dim]
            is_float = entry.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
            feeds[entry.name] = random.normal(size=shape).astype(np.float32) if is_float else np.zeros(shape, np.int64)
        found = Recorded(model, Facts(model.graph), run(with_outputs(proto, names), feeds) | feeds)
        assert not found.wrong_dims()
        assert not found.wrong_types()
        assert not found.wrong_contents()
        assert found.facts.dtype(found.values[-1]) is not None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("z = Resize(image, , , asked); asked = Concat<axis = 0>(front, pair); front = Shape<end = 2>(image)", "a 6 2 2"),
        ("z = Resize<axes = [3]>(image, , , last_of_x); last_of_x = Shape<start = 2>(x)", "a 6 b 4"),
        ("z = Resize(image, , scales); scales = Constant<value_floats = [1.0, 1.0, 2.0, 3.0]>()", "a 6 2*b 3*b"),
        ("z = Resize(image, , scales); scales = Constant<value_floats = [1.0, 1.0, 1.5, 1.0]>()", "a 6 z.2 b"),
        ('z = Resize<keep_aspect_ratio_policy = "not_smaller">(image, , , asked); asked = Shape(image)', "z.0 z.1 z.2 z.3"),
    ],
)
def test_a_resized_image_has_the_lengths_that_are_asked_for(line: str, told: str) -> None:
    graph = ir.from_proto(model_of(line)).graph
    dims = Facts(graph).dims(graph.outputs[0])
    assert dims is not None
    assert " ".join(map(str, dims)) == told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("z = MaxPool<kernel_shape = [2, 1], strides = [2, 1], pads = [1, 0, 0, 0]>(image)", "a 6 (((b + -1) // 2) + 1) b"),
        ("z = AveragePool<kernel_shape = [1, 2], ceil_mode = 1>(image)", "a 6 z.2 z.3"),
        ('z = AveragePool<kernel_shape = [1, 2], auto_pad = "SAME_UPPER">(image)', "a 6 z.2 z.3"),
        ("z = GlobalMaxPool(image)", "a 6 1 1"),
        (
            "z = ConvTranspose<strides = [2, 3], output_padding = [1, 0], pads = [0, 1, 0, 0]>(image, upwards)",
            "a 2 (2*b + 1) (3*b + -2)",
        ),
        ("z = ConvTranspose<output_shape = [9, 9]>(image, upwards)", "a 2 z.2 z.3"),
    ],
)
def test_lengths_of_places_that_a_kernel_is_put_at_are_known(line: str, told: str) -> None:
    graph = ir.from_proto(model_of(line)).graph
    assert " ".join(map(str, Facts(graph).dims(graph.outputs[0]) or ())) == told


_PADS = next(line for line in LINES if line.startswith("z = Pad(x, p); "))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (_PADS, "a b 5"),
        (_PADS.replace("all, shaped)", "longer, shaped); longer = Identity(all)"), "a b 5"),
        (_PADS.replace("low, zero, last)", "n, zero, last)"), "z.0 z.1 z.2"),
        (_PADS.replace("[0, 1]", "[1, 0]").replace("perm = [1, 0]", "perm = [0, 1]"), "a (b + 1) 4"),
    ],
)
def test_pads_that_torchscript_writes_as_views_of_a_list_are_known(line: str, told: str) -> None:
    graph = ir.from_proto(model_of(line)).graph
    assert " ".join(map(str, Facts(graph).dims(graph.outputs[0]) or ())) == told


_MULTIPLE = next(line for line in LINES if "short = Mod(gap, two)" in line)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (_MULTIPLE, "-2*(-1*b // 2)"),
        (_MULTIPLE.replace("Mod(gap, two)", "Identity(gap)"), "2*((b // 2) + 1)"),
        (_MULTIPLE.replace("Mod(gap, two)", "Mod<fmod = 1>(gap, two)"), "z.0"),
    ],
    ids=["padded to a multiple", "padded by another block", "a remainder of the sign of the dividend"],
)
def test_lengths_that_are_padded_to_a_multiple_are_known(line: str, told: str) -> None:
    graph = ir.from_proto(model_of(line)).graph
    assert " ".join(map(str, Facts(graph).dims(graph.outputs[0]) or ())) == told


@pytest.mark.parametrize(
    ("wanted", "dims"), [("4", (2, 3)), ("5", (5, 3)), ("", None)], ids=["the first branch", "the second branch", "not known"]
)
def test_an_if_that_sizes_decide_has_the_shape_of_the_branch_that_is_taken(wanted: str, dims: tuple[int, int] | None) -> None:
    test = f"four = Constant<value = int64 {{{wanted}}}>() c = Equal(length, four)" if wanted else "c = Equal(length, n)"
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 18]>
    chosen (float[4, s] x, float[2, 3] y, float[5, 3] w, int64 n) => (z) {{
        shape = Shape(x)
        zero = Constant<value = int64 {{0}}>()
        length = Gather(shape, zero)
        {test}
        z = If(c) <then_branch = t () => (p) {{ p = Relu(y) }}, else_branch = e () => (q) {{ q = Neg(w) }}>
    }}""")
    facts, (result,) = Facts(model.graph), model.graph.outputs
    found = facts.dims(result)
    assert facts.dtype(result) == ir.DataType.FLOAT
    assert found is not None
    assert found == dims or (dims is None and found[1] == 3 and not isinstance(found[0], int))


@pytest.mark.parametrize(("op", "dtype"), [("SimplifiedLayerNormalization", ir.DataType.FLOAT16), ("Unheard", None)])
def test_types_of_operators_that_the_runtime_has_put_into_the_standards_domain(op: str, dtype: ir.DataType | None) -> None:
    """The type of the result is that of the weight, as ONNX Runtime says; of an operator that nobody has nothing is known."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 17]>
    own (float[2, 4] x, float16[4] weight) => (y) {{ y, scale = {op}(x, weight) }}""")
    facts, result = Facts(model.graph), model.graph.outputs[0]
    assert facts.dtype(result) == dtype
    assert facts.dtype(model.graph[0].outputs[1]) is None


@pytest.mark.parametrize("number", ["0", "7"])
def test_a_number_is_known_behind_a_view_whatever_it_is(number: str) -> None:
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 18]>
    start (float[s] x) => (z) {{
        alone = Constant<value = int64 {{{number}}}>()
        again = Cast<to = 7>(alone)
        any = Constant<value_ints = [-1]>()
        start = Reshape(again, any)
        end = Constant<value_ints = [9223372036854775807]>()
        z = Slice(x, start, end)
    }}""")
    facts = Facts(model.graph)
    (start,) = (node.outputs[0] for node in model.graph if node.op_type == "Reshape")
    assert facts.content(start) == (int(number),)
    dims = facts.dims(model.graph.outputs[0])
    assert dims is not None
    assert (str(dims[0]) == "s") == (number == "0")


@pytest.mark.parametrize(
    ("mask", "shorter"), [("m, h, s, s", (True, True)), ("b, 2, s, s", (False, False)), ("h, s, s", (False, True))]
)
@pytest.mark.parametrize(
    "node", ["Attention(q, k, v, mask)", "com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x, , , mask)"]
)
def test_a_mask_of_an_attention_may_have_one_entry_or_one_head_for_all(node: str, mask: str, shorter: tuple[bool, bool]) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>
        g (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v, float[b, s, 8] x, float[{mask}] mask) => (float y)
        {{ y = {node} }}"""
    facts = Facts(ir.from_proto(onnx.parser.parse_model(text)).graph)
    entries, heads = sizes.symbol("m"), sizes.symbol("h")
    assert (entries in facts.shorter(sizes.symbol("b")), heads in facts.shorter(2)) == shorter
