"""Rows without a key are told by the condition that chooses a mask, where one does, and by its numbers elsewhere."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import parsed

_TEXT = """<ir_version: 10, opset_import: ["" : 18]>
attention (float[2, 3, 5, 4] q, float[2, 3, 5, 4] k, float[2, 3, 5, 4] v, bool[2, 1, 5, 5] seen, float[1, 3, 5, 5] given)
    => (float[2, 3, 5, 4] out)
<float[1, 3, 5, 5] table = {NUMBERS}, float ninf = {-inf}, float zero = {0}>
{
    hidden = Not(seen)
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    qk = MatMul(q, kt)
    mask = Where(CHOICE)
    masked = Add(qk, mask)
    weights = Softmax<axis = -1>(masked)
    lost = IsNaN(weights)
    kept = Where(lost, zero, weights)
    out = MatMul(kept, v)
}"""
_NUMBERS = ", ".join(f"{number:.3f}" for number in np.linspace(-4, 4, 75))


def _written(choice: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    text = _TEXT.replace("NUMBERS", _NUMBERS).replace("CHOICE", choice)
    result = onnx_attnfuse.optimize(parsed(text), ep="cpu", verify="sites")
    assert [site.status for site in result.report.sites] == ["fused"]
    return parsed(text), result.model if isinstance(result.model, onnx.ModelProto) else ir.to_proto(result.model)


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        pytest.param("seen, table, ninf", True, id="numbers of a table"),
        pytest.param("hidden, ninf, table", True, id="chosen where it does not hold"),
        pytest.param("seen, given, ninf", False, id="numbers that may be -inf themselves"),
    ],
)
def test_the_condition_that_chooses_a_mask_is_asked_where_it_tells(choice: str, asked: bool) -> None:
    source, model = _written(choice)
    ops = [node.op_type for node in model.graph.node]
    assert ("LessOrEqual" in ops, "Or" in ops) == (not asked, asked)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3, 5, 4)).astype(np.float32) for name in "qkv"}
    seen = rng.random((2, 1, 5, 5)) < 0.5
    seen[0, 0, 1] = seen[1] = False
    given = rng.standard_normal((1, 3, 5, 5)).astype(np.float32)
    given[0, 1, 2] = -np.inf
    feeds |= {"seen": seen, "given": given}
    expected, found = run(source, feeds)["out"], run(model, feeds)["out"]
    assert (expected[1] == 0).all()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("ep", "told_by"), [("qnn", "ReduceMax"), ("openvino", "ReduceSum")])
def test_rows_are_told_by_the_reduction_that_the_provider_runs(ep: str, told_by: str) -> None:
    text = _TEXT.replace("NUMBERS", _NUMBERS).replace("CHOICE", "seen, zero, ninf")
    result = onnx_attnfuse.optimize(parsed(text), ep=ep, verify="sites")
    assert [site.status for site in result.report.sites] == ["decomposed"]
    model = result.model if isinstance(result.model, onnx.ModelProto) else ir.to_proto(result.model)
    assert {"ReduceMax", "ReduceSum"} & {node.op_type for node in model.graph.node} == {told_by}
