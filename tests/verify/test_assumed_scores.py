"""Whole models whose rewrites hold for ordinary scores: no larger ones are tried, and a difference names the assumption."""

from __future__ import annotations

import pathlib

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import VerificationError
from onnx_attnfuse.options import Options
from onnx_attnfuse.verify.compare_models import check_models
from onnx_attnfuse.verify.verifier import Verifier

_MODEL = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, t, 8] x, bool[b, t] mask) => (float[b, t, 8] y)
<int64[1] last = {-1}, float tiny = {1e-9}> {
    turned = Transpose<perm = [0, 2, 1]>(x) scores = MatMul(x, turned) every = Softmax<axis = -1>(scores)
    at = Constant<value_ints = [1]>() row = Unsqueeze(mask, at) seen = Cast<to = 1>(row) left = Mul(every, seen)
    total = ReduceSum(left, last) some = Add(total, tiny) weights = Div(left, some) y = MatMul(weights, x) }"""


def _model(tiny: str = "1e-9") -> onnx.ModelProto:
    """Weights that are masked and divided by their sum, which a small number keeps from being 0."""
    return onnx.parser.parse_model(_MODEL.replace("1e-9", tiny))


def test_large_scores_are_not_tried_where_they_are_assumed_away() -> None:
    result = onnx_attnfuse.optimize(_model(), verify="model")
    assert "kept-weights" in result.report.sites[0].assumptions
    assert any("whole model verified on" in note for note in result.report.notes)
    assert check_models(_model(), result.model, tame=True).equal
    assert not check_models(_model(), result.model).equal, "large scores show nothing beyond the assumption any more"


def _judge(assumes: str, evidence: pathlib.Path) -> None:
    """Judges two models that differ."""
    verifier = Verifier(Options(verify="model", evidence=evidence))
    verifier.check_model(ir.from_proto(_model()), ir.from_proto(_model("0.5")), (), {assumes})


def test_what_is_wrong_is_found_with_ordinary_scores(tmp_path: pathlib.Path) -> None:
    with pytest.raises(VerificationError, match="this case may not meet kept-weights, which it relies on; report it"):
        _judge("kept-weights", tmp_path)


def test_other_assumptions_are_not_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(VerificationError, match="; report it") as found:
        _judge("large-fills", tmp_path)
    assert "may not meet" not in str(found.value)
