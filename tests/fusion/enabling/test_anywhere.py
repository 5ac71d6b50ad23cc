"""Whether any element is infinite, asked by a sum: equal for what overflows, for NaN and for neither."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnx_attnfuse.certify.certificate import certify
from tests.support.bundled import run
from tests.support.rewrites import counts, optimized

_TEXT = """<ir_version: 9, opset_import: ["" : {opset}]>
model (float16[b, s, 8] x, float16[b, s, 8] z) => (float16[b, s, 8] seen, float16[b, s, 8] y{outputs})
<int64[3] all = {{0, 1, 2}}, int64[1] last = {{-1}}>
{{ kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) weights = Softmax<axis = -1>(small)
   seen = MatMul(weights, x) wide = Cast<to = 1>(z) infinite = IsInf(wide) {nodes}
   limit = Where(any, low, high) negative = Neg(limit) above = Max(z, negative) y = Min(above, limit) }}"""
_CLAMP = "ones = Cast<to = 7>(infinite) most = ReduceMax<keepdims = 0>(ones) any = Cast<to = 9>(most)"
_LOWEST = _CLAMP.replace("Max", "Min")
_SUMMED = _CLAMP.replace("Max", "Sum")


def model_of(nodes: str, outputs: str = "", opset: int = 20) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_TEXT.format(nodes=nodes, outputs=outputs, opset=opset))
    for name, number in {"scale": 0.35, "low": 100, "high": 65504}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(number, np.float16), name))
    return model


@pytest.mark.parametrize(
    "nodes",
    [
        _CLAMP,
        _CLAMP.replace("(ones)", "(ones, all)"),
        _CLAMP.replace("(ones)", "(ones, last)").replace("keepdims = 0", "keepdims = 1"),
    ],
    ids=["all", "all by name", "each row"],
)
@pytest.mark.parametrize("opset", [18, 20])
def test_any_is_asked_by_a_sum_whatever_is_infinite(nodes: str, opset: int) -> None:
    before = model_of(nodes, opset=opset)
    after = optimized(before)
    assert (counts(after)["ReduceMax"], counts(after)["ReduceSum"]) == (0, 1)
    assert counts(after)["Cast"] == (1 if opset == 20 else 2)
    x, z = np.random.default_rng(0).standard_normal((2, 2, 300, 8)).astype(np.float16) * 200
    for place, number in (((), 0), ((0, 1, 2), np.inf), ((1, 0, 0), -np.inf), ((0, 0, 0), np.nan), (..., np.inf)):
        there = z.copy()
        if place != ():
            there[place] = number
        wanted, found = (run(item, {"x": x, "z": there}) for item in (before, after))
        np.testing.assert_array_equal(found["y"], wanted["y"])


def test_it_is_proved() -> None:
    before = model_of(_CLAMP)
    assert certify(ir.from_proto(before), ir.from_proto(optimized(before))).problems == ()


@pytest.mark.parametrize(
    ("nodes", "outputs", "ep"),
    [
        pytest.param(_CLAMP, "", "cpu", id="a CPU"),
        pytest.param(_CLAMP, ", int64 most", "cuda", id="the maximum is read"),
        pytest.param(_LOWEST, "", "cuda", id="whether all are"),
        pytest.param(_CLAMP.replace("ReduceMax<keepdims = 0>(ones)", "Identity(ones)"), "", "cuda", id="nothing is reduced"),
        pytest.param(_CLAMP.replace("(infinite)", "(z)"), "", "cuda", id="the largest number"),
    ],
)
def test_what_is_asked_otherwise_stays(nodes: str, outputs: str, ep: str) -> None:
    before = model_of(nodes, outputs)
    after = optimized(before, ep)
    for op in ("ReduceMax", "ReduceSum", "ReduceMin"):
        assert counts(after)[op] == counts(before)[op]
