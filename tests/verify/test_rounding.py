"""Whole models of float16 judged as a GPU computes them: rows without a key, whose scores the mask erases there."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.verify.float32_copy import has_float16, rounded
from onnx_attnfuse.verify.options import Trials
from tests.support.bundled import run

_SUM = """<ir_version: 8, opset_import: ["" : {opset}]>
model (float16[s, t] x, float16[t] mask) => (float16[s, t] y) {{ {nodes} }}"""
_CHAIN = "masked = Add(x, mask) y = Softmax<axis = -1>(masked)"
_INSIDE = """yes = Constant<value = bool {1}> ()
y = If(yes) <then_branch = one () => (float16[s, t] a) {
    masked = Add(x, mask) a = Softmax<axis = -1>(masked) },
  else_branch = other () => (float16[s, t] b) { b = Identity(x) }>"""
_ATTENTION = """<ir_version: 8, opset_import: ["" : 20]>
model (float16[b, s, 16] x, int64[b, s] mask) => (float16[b, s, 16] y) {
    kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale)
    kept = Cast<to = 9>(mask) row = Unsqueeze(kept, one) bias = Where(row, open, closed) masked = Add(small, bias)
    weights = Softmax<axis = -1>(masked) y = MatMul(weights, x) }"""


def attention() -> onnx.ModelProto:
    """An attention that hides keys by the lowest number of float16."""
    model = onnx.parser.parse_model(_ATTENTION)
    numbers = {"scale": np.float16(0.5), "one": np.asarray([1]), "open": np.float16(0), "closed": np.float16(-65504)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in numbers.items())
    return model


@pytest.mark.parametrize("nodes", [_CHAIN, _INSIDE], ids=["a chain", "in a branch"])
def test_scores_are_erased_by_a_mask_as_float16_has_it(nodes: str) -> None:
    model = onnx.parser.parse_model(_SUM.format(opset=16, nodes=nodes))
    x, mask = np.float16([[0, 1, 2, 3]]), np.full(4, -65504, np.float16)
    wide = run(model, {"x": x, "mask": mask})["y"]
    assert wide.std() > 0.1, "ONNX Runtime rounds by itself; this page is not needed any more"
    found = run(ir.to_proto(rounded(ir.from_proto(model))), {"x": x, "mask": mask})["y"]
    sums = x + mask
    weights = np.exp((sums - sums.max()).astype(np.float32))
    np.testing.assert_allclose(found, weights / weights.sum(), atol=1e-3)


@pytest.mark.parametrize("opset", [9, 10])
def test_a_model_from_before_there_were_sequences_is_as_it_was(opset: int) -> None:
    model = ir.from_proto(onnx.parser.parse_model(_SUM.format(opset=opset, nodes=_CHAIN)))
    assert rounded(model) is model


def test_a_model_without_float16_gets_nothing() -> None:
    model = ir.from_proto(onnx.parser.parse_model(_SUM.format(opset=16, nodes=_CHAIN).replace("float16", "float")))
    assert not has_float16(model)
    assert [node.op_type for node in rounded(model).graph] == ["Add", "Softmax"]


@pytest.mark.parametrize("ep", ["cuda", "cpu"])
def test_a_whole_model_is_judged_as_its_device_rounds(ep: str) -> None:
    result = onnx_attnfuse.optimize(attention(), ep=ep, arch="sm90" if ep == "cuda" else None, verify="model")
    assert result.report.fused == 1
    assert any("whole model verified on" in note for note in result.report.notes)


@pytest.mark.parametrize("round_float16", [False, True])
@pytest.mark.parametrize("ep", ["cuda", "cpu"])
def test_two_models_are_compared_as_asked(ep: str, round_float16: bool) -> None:
    """A model for one kind of device is not equal on the other, where rows without a key are something else in the source."""
    fused = onnx_attnfuse.optimize(attention(), ep=ep, arch="sm90" if ep == "cuda" else None).model
    found = onnx_attnfuse.verify_models(attention(), fused, Trials(round_float16=round_float16))
    assert found.equal == (round_float16 == (ep == "cuda"))
    assert found.equal or "a fully masked row" in found.detail or "padding" in found.detail


def test_what_is_wrong_is_found_with_roundings_too() -> None:
    fused = onnx_attnfuse.optimize(attention(), ep="cuda", arch="sm90").model
    (node,) = (node for node in fused.graph.node if node.domain == "com.microsoft")
    next(item for item in node.attribute if item.name == "scale").f = 0.4
    found = onnx_attnfuse.verify_models(attention(), fused, Trials(round_float16=True))
    assert not found.equal
    assert found.divergence is not None
