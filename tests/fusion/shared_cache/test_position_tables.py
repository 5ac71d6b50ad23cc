"""Cosines and sines of a decoder as tables with a row for each position, where the most positions are told."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion.shared_cache.positions import LEAST_ROWS
from onnx_attnfuse.verify import decoder_loop
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import Fed, assert_same_at_tokens, buffered, grown, steps
from tests.support.decoders import UNPADDED, decoder

_EXPORTS = [
    *(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa"),
    *sorted((pathlib.Path(__file__).parent / "exports").glob("*a*_past__*.onnx")),
]
_PADDINGS = [
    [[1] * 6] * 2,
    [[0, 0, 1, 1, 1, 1], [1] * 6],
    [[1, 1, 1, 1, 0, 0], [1] * 6],
    [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]],
]


def _shared(model: onnx.ModelProto, **choices: object) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "shared", "context_length": 700, **choices})


def _turns(model: onnx.ModelProto) -> set[str]:
    """The cosines and sines that are computed of inputs, in every step."""
    fed = {item.name for item in model.graph.input}
    found: set[str] = set()
    for node in model.graph.node:
        if fed.intersection(node.input):
            fed.update(node.output)
            found |= {node.op_type} & {"Cos", "Sin"}
    return found


def _assert_serves(model: onnx.ModelProto, result: onnx_attnfuse.Result, fed: list[Fed]) -> None:
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)


@pytest.mark.parametrize("path", _EXPORTS, ids=lambda path: path.stem)
def test_real_exports_compute_no_angle_in_a_step_and_give_the_same(path: pathlib.Path) -> None:
    model = onnx.load(path)
    result = _shared(model)
    assert _turns(model) == {"Cos", "Sin"}
    assert _turns(result.model) == set()
    assert all("indices-in-range" in site.assumptions for site in result.report.sites)
    for padding in _PADDINGS[: 2 if path.stem.startswith(("mistral", "gemma2")) else 4]:
        _assert_serves(model, result, steps(padding, (1, 1)))
    assert result.report.decoder is not None
    assert result.report.decoder.context_length == 700


def test_the_exports_are_those_that_were_meant() -> None:
    assert [path.stem for path in _EXPORTS] == [
        "llama_past__dyn18__sdpa", "gemma2_past__ts17__eager", "llama_past__ts17__sdpa", "mistral_past__dyn18__sdpa",
    ]  # fmt: skip


@pytest.mark.parametrize("padding", ["auto", "assume-right"])
def test_onnx_runtime_computes_the_tables_when_a_session_starts(padding: str, tmp_path: pathlib.Path) -> None:
    model = onnx.load(_EXPORTS[0])
    options, path = onnxruntime.SessionOptions(), tmp_path / "started.onnx"
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    onnxruntime.InferenceSession(_shared(model, padding=padding).model.SerializeToString(), options)
    started = onnx.load(path)
    assert {"Cos", "Sin", "Range"}.isdisjoint({node.op_type for node in started.graph.node})
    tables = [item for item in started.graph.initializer if list(item.dims) == [700, 4]]
    angles = np.arange(700)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    found = sorted((onnx.numpy_helper.to_array(item) for item in tables), key=lambda item: -item[0, 0])
    assert len(found) == 2
    np.testing.assert_allclose(found[0], np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(found[1], np.sin(angles), atol=1e-4)


def test_rotations_of_float32_stay_in_front_of_the_operator(tmp_path: pathlib.Path) -> None:
    """ONNX Runtime folds them into it for float16, by positions that it counts; there a Reshape is in its way."""
    for dtype, reshaped in (("float", False), ("float16", True)):
        result = _shared(decoder(dtype=dtype, size=32))
        values = [node.input[2] for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
        made = {name: node.op_type for node in result.model.graph.node for name in node.output}
        assert {made[name] == "Reshape" for name in values} == {reshaped}
        options, path = onnxruntime.SessionOptions(), tmp_path / f"{dtype}.onnx"
        options.optimized_model_filepath, options.log_severity_level = str(path), 4
        onnxruntime.InferenceSession(result.model.SerializeToString(), options)
        started = [node.op_type for node in onnx.load(path).graph.node]
        assert started.count("RotaryEmbedding") == 4


def test_a_position_behind_the_last_ends_in_an_error_and_padding_may_have_any_before_the_first() -> None:
    model = decoder()
    result = _shared(model)
    found = result.report.decoder
    assert found is not None
    fed = steps(_PADDINGS[1], (1,))
    truth = grown(model, found, fed)

    class Before(Fed):
        @property
        def positions(self) -> np.ndarray:
            return (self.mask.cumsum(1) - 1)[:, -self.tokens.shape[1] :]

    before = [Before(step.tokens, step.mask) for step in fed]
    assert before[0].positions.min() == -1
    assert_same_at_tokens(truth, buffered(result.model, found, before), fed)

    class Behind(Fed):
        @property
        def positions(self) -> np.ndarray:
            return super().positions + 700

    behind = [Behind(step.tokens, step.mask) for step in fed]
    with pytest.raises(Exception, match="out of data bounds"):
        buffered(result.model, found, behind)
    assert_same_at_tokens(grown(model, found, behind), buffered(_shared(model, context_length=800).model, found, behind), fed)


def test_a_decoder_is_judged_with_few_rows_and_has_all_of_them_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    check = decoder_loop.check_decoder

    def seen(before: ir.Model, after: ir.Model, *more: Any) -> Any:
        judged.extend(node.outputs[0].shape[0] for node in after.graph if node.op_type in {"Cos", "Sin"})
        return check(before, after, *more)

    monkeypatch.setattr(decoder_loop, "check_decoder", seen)
    result = _shared(onnx.load(_EXPORTS[0]), context_length=131072)
    assert set(judged) == {LEAST_ROWS}
    shapes = {item.name: [dim.dim_value for dim in item.type.tensor_type.shape.dim] for item in result.model.graph.value_info}
    assert {shapes[node.output[0]][0] for node in result.model.graph.node if node.op_type in {"Cos", "Sin"}} == {131072}


def test_a_table_has_rows_for_all_that_a_decoder_is_judged_by() -> None:
    result = _shared(decoder(), context_length=3)
    assert result.report.decoder is not None, result.report.notes
    assert result.report.decoder.context_length == 3
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in result.model.graph.initializer}
    (counted,) = (node for node in result.model.graph.node if node.op_type == "Range" and node.input[1] in constants)
    assert constants[counted.input[1]] == LEAST_ROWS


_SLOWER = "most = ReduceMax<keepdims=0>(position_ids) longest = Cast<to=1>(most) angles = Div(turned, longest)"


@pytest.mark.parametrize(
    ("choices", "change"),
    [
        ({"context_length": None}, ""),
        ({"assume": ("large-fills", "bounded-scores", "named-sizes", "nonempty-axes", "masks-fit", "padded-rows-unused")}, ""),
        ({}, "longest"),
        ({"ep": "cuda", "arch": "sm90", "verify": "none"}, ""),
    ],
    ids=["the most is not told", "positions may be anything", "angles depend on the longest text", "on CUDA"],
)
def test_otherwise_angles_are_computed_in_each_step(choices: dict[str, object], change: str) -> None:
    model = decoder(size=32, dtype="float16" if choices.get("ep") == "cuda" else "float")
    if change:
        (product,) = (node for node in model.graph.node if node.output[0] == "angles")
        product.output[0] = "turned"
        at = list(model.graph.node).index(product) + 1
        more = onnx.parser.parse_graph(
            f"g (int64[b, s] position_ids, float[b, s, c] turned) => (float[b, s, c] angles) {{{_SLOWER}}}"
        )
        nodes = [*model.graph.node[:at], *more.node, *model.graph.node[at:]]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    result = _shared(model, **choices)
    assert result.report.decoder is not None, result.report.notes
    assert _turns(result.model) == {"Cos", "Sin"}
    if "ep" not in choices:
        _assert_serves(model, result, steps(_PADDINGS[1], (1, 1)))


def test_positions_that_the_model_counts_are_as_they_were() -> None:
    model = decoder(seen=UNPADDED, given=False)
    result = _shared(model)
    _assert_serves(model, result, steps(_PADDINGS[0], (1, 1)))
    assert _turns(result.model) == {"Cos", "Sin"}


@pytest.mark.parametrize(
    ("choices", "message"),
    [({"context_length": 0}, "from 1 on"), ({"cache": "as-is"}, "choose cache 'shared' or 'paged'")],
)
def test_a_length_that_says_nothing_is_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match=message):
        _shared(decoder(), **choices)


def test_all_layers_take_rows_of_the_same_two_tables() -> None:
    result = _shared(onnx.load(_EXPORTS[0]))
    made = [node.output[0] for node in result.model.graph.node if node.op_type in {"Cos", "Sin"}]
    rotations = [node for node in result.model.graph.node if node.op_type == "RotaryEmbedding"]
    assert len(made) == 2
    assert len(rotations) == 4
    assert len({tuple(node.input[1:]) for node in rotations}) == 1
