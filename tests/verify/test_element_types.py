"""A float mask that is an input: the judge draws its numbers in the model's own element type."""

from __future__ import annotations

import onnx.parser
import pytest

import onnx_attnfuse

MODEL = """<ir_version: 10, opset_import: ["" : 18]>
attention ({0}[b, 2, s, 8] q, {0}[b, 2, t, 8] k, {0}[b, 2, t, 8] v, {0}[b, 1, s, t] bias) => ({0}[b, 2, s, 8] out) {{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    masked = {1}(scores, bias)
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, v)
}}"""


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_what_is_added_is_a_bias_in_every_type_and_what_is_multiplied_is_none(dtype: str) -> None:
    (site,) = onnx_attnfuse.optimize(onnx.parser.parse_model(MODEL.format(dtype, "Add")), ep="cuda").report.sites
    assert (site.status, site.op) == ("fused", "MultiHeadAttention")
    assert site.verified is not None
    (site,) = onnx_attnfuse.optimize(onnx.parser.parse_model(MODEL.format(dtype, "Mul")), ep="cuda").report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["scale-by-key"])
