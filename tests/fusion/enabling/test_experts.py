"""Layers of experts as one operator: how they may be spelled, and what keeps them as they are."""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from tests.support.decoder_loops import assert_same_at_tokens, buffered, grown, steps

Array = npt.NDArray[Any]
_EXPORT = pathlib.Path(__file__).parent / "exports" / "qwen3_moe_past__ts17__sdpa.onnx"
_EXPERTS, _CHANNELS, _INNER = 4, 16, 24
_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model ({type}[b, s, 16] x{inputs}) => ({type}[b, s, 16] y)
<int64[2] flat = {{-1, 16}}, int64[1] all = {{-1}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] first = {{0}},
 int64[1] last = {{-1}},
 int64[3] twice = {{1, 2, 1}}, int64[3] paired = {{-1, 2, 16}}, int64[1] middle = {{24}}, int64[1] end = {{48}},
 int64 half = {{24}}, int64 none = {{0}}, int64 next = {{1}}, int64[3] pair = {{2, 1, 1}}, int64[3] halved = {{-1, 2, 8}},
 int64[1] far = {{9223372036854775807}}>
{{ kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) level = Softmax<axis = -1>(small)
   seen = MatMul(level, x)
   tokens = Reshape(seen, flat) logits = MatMul(tokens, gate)
   {routing} {copies} which = Reshape(chosen, all) {first}
   {halves} gated = Mul(silu, l) {second}
   factors = Reshape(weights, all) factor = Unsqueeze(factors, one) weighted = Mul(narrow, factor)
   pairs = Reshape(weighted, paired) {total} sizes = Shape(x) mixed = Reshape(summed, sizes) y = Add(mixed, seen) }}"""
_FORM = {
    "type": "float",
    "inputs": "",
    "routing": "p = Softmax<axis = -1>(logits) weights, chosen = TopK(p, two)",
    "copies": "apart = Unsqueeze(tokens, one) copies = Expand(apart, twice) rows = Reshape(copies, flat)",
    "first": """each = Gather(w1, which) column = Unsqueeze(rows, two) doubled = MatMul(each, column)
       wide = Squeeze(doubled, two)""",
    "halves": "g, l = Split<axis = -1, num_outputs = 2>(wide) sigmoid = Sigmoid(g) silu = Mul(g, sigmoid)",
    "second": "back = Gather(w2, which) inner = Unsqueeze(gated, two) out = MatMul(back, inner) narrow = Squeeze(out, two)",
    "total": "summed = ReduceSum<keepdims = 0>(pairs, one)",
}
_NORMED = "p = Softmax<axis = -1>(logits) best, chosen = TopK(p, two) sum = ReduceSum(best, last) weights = Div(best, sum)"
_SILU = "sigmoid = Sigmoid(g) silu = Mul(g, sigmoid)"
_HELD = """g = Clip(gs, , limit) inside = Mul(g, alpha) sigmoid = Sigmoid(inside) silu = Mul(g, sigmoid)
   low = Clip(ls, floor, limit) l = Add(low, unit)"""
_INSIDE: dict[str, dict[str, str]] = {
    "a softmax of all": {},
    "a sum of one": {"routing": _NORMED},
    "a softmax of the best": {"routing": "best, chosen = TopK(logits, two) weights = Softmax<axis = -1>(best)"},
    "rows": {
        "first": "each = Gather(w1t, which) row = Unsqueeze(rows, one) doubled = MatMul(row, each) wide = Squeeze(doubled, one)",
        "second": "back = Gather(w2t, which) inner = Unsqueeze(gated, one) out = MatMul(inner, back) narrow = Squeeze(out, one)",
    },
    "transposed once gathered": {
        "first": """gathered = Gather(w1t, which) each = Transpose<perm = [0, 2, 1]>(gathered) column = Unsqueeze(rows, two)
           doubled = MatMul(each, column) wide = Squeeze(doubled, two)"""
    },
    "by GatherND": {
        "second": """at = Unsqueeze(which, one) back = GatherND(w2, at) inner = Unsqueeze(gated, two) out = MatMul(back, inner)
           narrow = Squeeze(out, two)"""
    },
    "slices": {"halves": f"g = Slice(wide, first, middle, one) l = Slice(wide, middle, end, one) {_SILU}"},
    "a sequence": {
        "halves": f"""parts = SplitToSequence<axis = -1>(wide, half) g = SequenceAt(parts, none)
           l = SequenceAt(parts, next) {_SILU}"""
    },
    "with biases, a limit and channels in turn": {
        "routing": "best, chosen = TopK(logits, two) weights = Softmax<axis = -1>(best)",
        "first": """each = Gather(w1t, which) row = Unsqueeze(rows, one) product = MatMul(row, each)
           narrowed = Squeeze(product, one) more = Gather(b1, which) wide = Add(narrowed, more)""",
        "halves": f"""gs = Slice(wide, first, far, last, two) ls = Slice(wide, one, far, last, two) {_HELD}""",
        "second": """back = Gather(w2t, which) inner = Unsqueeze(gated, one) out = MatMul(inner, back) bare = Squeeze(out, one)
           rest = Gather(b2, which) narrow = Add(bare, rest)""",
    },
    "with biases of halves": {
        "first": """each = Gather(w1, which) column = Unsqueeze(rows, two) product = MatMul(each, column)
           narrowed = Squeeze(product, two) more = Gather(b1, which) wide = Add(more, narrowed)"""
    },
    "tiles": {"copies": "apart = Unsqueeze(tokens, one) copies = Tile(apart, twice) rows = Reshape(copies, flat)"},
    "in float16, routed in float32": {
        "type": "float16",
        "routing": """wide_logits = Cast<to = 1>(logits) p = Softmax<axis = -1>(wide_logits) best, chosen = TopK(p, two)
           weights = Cast<to = 10>(best)""",
        "total": """wide_pairs = Cast<to = 1>(pairs) total = ReduceSum<keepdims = 0>(wide_pairs, one)
           summed = Cast<to = 10>(total)""",
    },
}
_APART: dict[str, dict[str, str]] = {
    "the worst experts": {"routing": "p = Softmax<axis = -1>(logits) weights, chosen = TopK<largest = 0>(p, two)"},
    "chosen with a bias": {
        "routing": """p = Softmax<axis = -1>(logits) biased = Add(p, lean) best, chosen = TopK(biased, two)
           weights = GatherElements<axis = 1>(p, chosen)"""
    },
    "a softmax over tokens": {"routing": "p = Softmax<axis = 0>(logits) weights, chosen = TopK(p, two)"},
    "sigmoids": {"routing": "p = Sigmoid(logits) weights, chosen = TopK(p, two)"},
    "weights squared": {"routing": "p = Softmax<axis = -1>(logits) best, chosen = TopK(p, two) weights = Mul(best, best)"},
    "a sum of all": {
        "routing": "p = Softmax<axis = -1>(logits) best, chosen = TopK(p, two) sum = ReduceSum(p, last) weights = Div(best, sum)"
    },
    "copies in another order": {
        "copies": "apart = Unsqueeze(tokens, first) copies = Tile(apart, pair) rows = Reshape(copies, flat)"
    },
    "sums of halves": {"total": "finer = Reshape(weighted, halved) summed = ReduceSum<keepdims = 0>(finer, one)"},
    "a mean": {"total": "summed = ReduceMean<keepdims = 0>(pairs, one)"},
}
_OUTSIDE: dict[str, dict[str, str]] = {
    "gated by the other half": {
        "halves": "l, g = Split<axis = -1, num_outputs = 2>(wide) sigmoid = Sigmoid(g) silu = Mul(g, sigmoid)"
    },
    "another gate": {"halves": "g, l = Split<axis = -1, num_outputs = 2>(wide) gate_of = Tanh(g) silu = Mul(g, gate_of)"},
    "other experts behind": {
        "second": """q = Neg(p) others, worst = TopK(q, two) whom = Reshape(worst, all) back = Gather(w2, whom)
           inner = Unsqueeze(gated, two) out = MatMul(back, inner) narrow = Squeeze(out, two)"""
    },
    "held below another limit": {
        "halves": "gs, ls = Split<axis = -1, num_outputs = 2>(wide) "
        + _HELD.replace("Clip(ls, floor, limit)", "Clip(ls, floor, unit)")
    },
    "held on one side": {
        "halves": "gs, ls = Split<axis = -1, num_outputs = 2>(wide) "
        + _HELD.replace("Clip(ls, floor, limit)", "Clip(ls, , limit)")
    },
    "biases of other experts": {
        "first": """each = Gather(w1, which) column = Unsqueeze(rows, two) product = MatMul(each, column)
           narrowed = Squeeze(product, two) q = Neg(p) others, worst = TopK(q, two) whom = Reshape(worst, all)
           more = Gather(b1, whom) wide = Add(more, narrowed)"""
    },
    "one token for all": {
        "copies": "mean = ReduceMean<keepdims = 1>(tokens, first) rows = Identity(mean)",
        "routing": "p = Softmax<axis = -1>(logits) weights, chosen = TopK(p, two)",
    },
    "matrices that are given": {
        "inputs": ", float[4, 48, 16] given",
        "first": """each = Gather(given, which) column = Unsqueeze(rows, two) doubled = MatMul(each, column)
           wide = Squeeze(doubled, two)""",
    },
}


def _model(changes: dict[str, str]) -> onnx.ModelProto:
    form = {**_FORM, **changes}
    model = onnx.parser.parse_model(_TEXT.format(**form))
    rng = np.random.default_rng(0)
    w1 = rng.standard_normal((_EXPERTS, 2 * _INNER, _CHANNELS)) / 3
    w2 = rng.standard_normal((_EXPERTS, _CHANNELS, _INNER)) / 3
    weights = {"w1": w1, "w2": w2, "w1t": w1.transpose(0, 2, 1), "w2t": w2.transpose(0, 2, 1)}
    weights |= {
        "gate": rng.standard_normal((_CHANNELS, _EXPERTS)),
        "scale": np.asarray(0.3),
        "lean": rng.standard_normal(_EXPERTS),
    }
    weights |= {"b1": rng.standard_normal((_EXPERTS, 2 * _INNER)), "b2": rng.standard_normal((_EXPERTS, _CHANNELS))}
    weights |= {name: np.asarray(item) for name, item in {"limit": 0.8, "floor": -0.8, "alpha": 1.7, "unit": 1.0}.items()}
    dtype = np.float16 if form["type"] == "float16" else np.float32
    read = {name for node in model.graph.node for name in node.input}
    for name, array in weights.items():
        if name not in read:
            continue
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array.astype(dtype)), name))
    return model


def _run(model: onnx.ModelProto, feeds: dict[str, Array], *, optimised: bool = False) -> Array:
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return np.asarray(result)


def _optimized(model: onnx.ModelProto, **choices: Any) -> tuple[onnx.ModelProto, int]:
    result = onnx_attnfuse.optimize(model, **{"ep": "cpu", "verify": "sites", **choices})
    assert not result.report.failures
    notes = [note for note in result.report.notes if "layers of experts" in note]
    return result.model, int(notes[0].split()[0]) if notes else 0


def _ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("ep", ["cpu", "cuda"])
@pytest.mark.parametrize("changes", _INSIDE.values(), ids=_INSIDE)
def test_experts_become_one_operator(changes: dict[str, str], ep: str) -> None:
    before = _model(changes)
    after, count = _optimized(before, ep=ep, arch="sm90" if ep == "cuda" else None)
    assert count == 1
    (node,) = (item for item in after.graph.node if item.op_type == "MoE")
    assert next(item.i for item in node.attribute if item.name == "k") == 2
    assert not {"Gather", "GatherND", "SplitToSequence"} & set(_ops(after))
    dtype = np.float16 if changes.get("type") == "float16" else np.float32
    x = np.random.default_rng(1).standard_normal((2, 5, _CHANNELS)).astype(dtype)
    wanted = _run(before, {"x": x})
    for optimised in (False, True):
        found = _run(after, {"x": x}, optimised=optimised)
        tolerance = 2e-2 if dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("changes", _APART.values(), ids=_APART)
def test_with_other_weights_each_copy_of_a_token_has_one_expert(changes: dict[str, str]) -> None:
    before = _model(changes)
    after, count = _optimized(before)
    assert count == 1
    (node,) = (item for item in after.graph.node if item.op_type == "MoE")
    assert next(item.i for item in node.attribute if item.name == "k") == 1
    assert "Gather" not in _ops(after)
    x = np.random.default_rng(1).standard_normal((2, 5, _CHANNELS)).astype(np.float32)
    wanted = _run(before, {"x": x})
    for optimised in (False, True):
        np.testing.assert_allclose(
            _run(after, {"x": x}, optimised=optimised), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max()
        )


@pytest.mark.parametrize("changes", _OUTSIDE.values(), ids=_OUTSIDE)
def test_near_misses_stay(changes: dict[str, str]) -> None:
    after, count = _optimized(_model(changes))
    assert count == 0
    assert _ops(after)["MoE"] == 0


@pytest.mark.parametrize("padding", [[[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6]], ids=["none", "left"])
def test_a_decoder_with_experts_serves_from_one_buffer(padding: list[list[int]]) -> None:
    model = onnx.load(_EXPORT)
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared", verify="sites")
    told = result.report.decoder
    assert told is not None
    assert (_ops(result.model)["MoE"], _ops(result.model)["GroupQueryAttention"]) == (2, 2)
    fed = steps(padding, (1, 1, 1))
    assert_same_at_tokens(grown(model, told, fed), buffered(result.model, told, fed), fed)


def test_experts_that_tie_are_chosen_as_in_the_source() -> None:
    before = _model({})
    for item in before.graph.initializer:
        if item.name == "gate":  # all experts are alike to the router
            item.CopyFrom(numpy_helper.from_array(np.ones((_CHANNELS, _EXPERTS), np.float32), "gate"))
    after, count = _optimized(before)
    assert count == 1
    x = np.random.default_rng(1).standard_normal((2, 5, _CHANNELS)).astype(np.float32)
    np.testing.assert_allclose(_run(after, {"x": x}), _run(before, {"x": x}), rtol=1e-5, atol=1e-5)


def test_without_the_assumption_that_no_axis_is_empty_they_stay() -> None:
    assert _optimized(_model({}), assume=("none",))[1] == 0


def test_on_a_provider_without_the_operator_they_stay() -> None:
    assert _optimized(_model({}), ep="openvino")[1] == 0


def test_matrices_lie_in_the_model_once() -> None:
    before = _model({})
    after, _ = _optimized(before)
    kept = [list(item.dims) for item in after.graph.initializer if len(item.dims) == 3]
    assert sorted(kept) == [[_EXPERTS, _CHANNELS, _INNER], [_EXPERTS, 2 * _INNER, _CHANNELS]]
