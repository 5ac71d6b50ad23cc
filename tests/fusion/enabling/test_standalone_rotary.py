"""Rotations beside attentions: of heads that are counted in the model, and of as many as there are at run time."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse

_TEXT = """<ir_version: 10, opset_import: ["" : 18]>
model (float[b, {heads}, s, 8] q, float[b, {heads}, s, 8] k, float[b, {heads}, s, 8] v, float[s, 4] angles)
=> (float[b, {heads}, s, 8] out, float[b, {heads}, s, 8] q_t)
<int64[1] none = {{0}}, int64[1] half = {{4}}, int64[1] end = {{8}}, int64[1] last = {{-1}}, float scale = {{0.35}}>
{{
    cos = Cos(angles) sin = Sin(angles) cs = Concat<axis = -1>(cos, cos) sn = Concat<axis = -1>(sin, sin)
    {turned}
    kt = Transpose<perm = [0, 1, 3, 2]>(k_t) qk = MatMul(q_t, kt) scores = Mul(qk, scale)
    weights = Softmax<axis = -1>(scores) out = MatMul(weights, v)
}}"""
_TURNED = """{0}_a = Slice({0}, none, half, last) {0}_b = Slice({0}, half, end, last) {0}_n = Neg({0}_b)
    {0}_r = Concat<axis = -1>({0}_n, {0}_a) {0}_c = Mul({0}, cs) {0}_s = Mul({0}_r, sn) {0}_t = Add({0}_c, {0}_s)"""


@pytest.mark.parametrize(("heads", "operators"), [("4", 2), ("n", 1)])
def test_heads_that_are_not_counted_are_not_rotated_by_an_operator(heads: str, operators: int) -> None:
    model = onnx.parser.parse_model(_TEXT.format(heads=heads, turned=" ".join(map(_TURNED.format, "qk"))))
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert not result.report.failures
    assert result.report.fused == 1
    assert [node.op_type for node in result.model.graph.node].count("RotaryEmbedding") == operators
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 4, 5, 8), np.float32) for name in "qkv"}
    feeds["angles"] = np.arange(20, dtype=np.float32).reshape(5, 4)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = onnxruntime.InferenceSession(model.SerializeToString(), plain).run(None, feeds)
    actual = onnxruntime.InferenceSession(result.model.SerializeToString()).run(None, feeds)
    for found, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
