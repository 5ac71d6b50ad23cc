"""Heads whose size a model computes from its input at run time, as TorchScript writes `reshape(b, n, 3, heads, c // heads)`."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.folding import fold
from tests.support.bundled import run

_TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[b, n, c] x, float[1, 2, n, n] bias) => (float[b, n, c] o)
<int64 two = {2}, int64 nought = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] third = {2}, int64[2] middle = {3, 2}> {
  shape = Shape(x) channels = Gather<axis=0>(shape, two) head = Div(channels, two) last = Unsqueeze(head, first)
  tokens = Slice(shape, first, third) parts = Concat<axis=0>(tokens, middle, last)
  y = MatMul(x, w) BIASED
  r = Reshape(z, parts) t = Transpose<perm=[2, 0, 3, 1, 4]>(r)
  q = Gather<axis=0>(t, nought) k = Gather<axis=0>(t, one) v = Gather<axis=0>(t, two)
  kt = Transpose<perm=[0, 1, 3, 2]>(k) s = MatMul(q, kt) masked = Add(s, bias) p = Softmax<axis=-1>(masked)
  pv = MatMul(p, v) back = Transpose<perm=[0, 2, 1, 3]>(pv) o = Reshape(back, shape) }"""


def _model(*, biased: bool) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_TEXT.replace("BIASED", "z = Add(y, wb)" if biased else "z = Identity(y)"))
    rng = np.random.default_rng(0)
    for name, dims in (("w", (12, 36)), ("wb", (36,))):
        model.graph.initializer.append(numpy_helper.from_array(0.3 * rng.standard_normal(dims, np.float32), name))
    return model


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ep", ["cpu", "cuda"])
def test_their_size_follows_from_the_columns_of_the_weight(ep: str, biased: bool) -> None:
    model = _model(biased=biased)
    result = onnx_attnfuse.optimize(model, ep=ep, arch="sm90" if ep == "cuda" else None)
    (site,) = result.report.sites
    assert (result.report.failures, site.status, site.head_size) == ((), "fused", 6)
    rng = np.random.default_rng(1)
    given = {"x": rng.standard_normal((2, 5, 12), np.float32), "bias": rng.standard_normal((1, 2, 5, 5), np.float32)}
    np.testing.assert_allclose(run(result.model, given)["o"], run(model, given)["o"], atol=1e-5)


def test_a_constant_of_a_shape_that_is_not_known_stays_computed() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[a, c] x) => (float[d, e] y)
      <float[6, 4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24}> { s = Shape(x) y = Reshape(w, s) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    builder = Builder(model.graph, Facts(model.graph), 17, set())
    assert fold([model.graph.outputs[0]], builder, "folded") == 0
    assert [node.op_type for node in model.graph] == ["Shape", "Reshape"]
