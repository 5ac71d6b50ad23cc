"""Constants that calls pass to functions are constants inside where all calls agree, and the model stays equal."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.arguments import embed_arguments
from tests.support.bundled import run_in, session

_HEADS = """
<domain: "own", opset_import: ["" : 18]> heads (x, sizes) => (y) {
  split = Reshape(x, sizes) y = Transpose<perm = [0, 2, 1, 3]>(split) }
"""
_ATTENTION = """
<domain: "own", opset_import: ["" : 18, "own" : 1]> attention (q, k, v, first, second, joined, scale) => (y) {
  qh = own.heads(q, first) kh = own.heads(k, second) vh = own.heads(v, second) kt = Transpose<perm = [0, 1, 3, 2]>(kh)
  scores = MatMul(qh, kt) scaled = Mul(scores, scale) weights = Softmax<axis = -1>(scaled) mixed = MatMul(weights, vh)
  back = Transpose<perm = [0, 2, 1, 3]>(mixed) y = Reshape(back, joined) }
"""
_MODEL = """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
g (float[b, s, 8] q, float[b, t, 8] k, float[b, t, 8] v%s) => (float[b, s, 8] o)
<int64[4] sizes = {0, -1, 2, 4}, int64[4] others = {%s}, int64[3] joined = {0, -1, 8}, float scale = {0.5}, float other = {%s}>
{ a = own.attention(q, k, v, sizes, sizes, joined, %s) o = own.attention(a, k, v, others, others, joined, other) }"""


def _model(others: str = "0, -1, 2, 4", scale: str = "scale", other: str = "0.5") -> onnx.ModelProto:
    given = ", float given" if scale == "given" else ""
    return onnx.parser.parse_model(_MODEL % (given, others, other, scale) + _HEADS + _ATTENTION)


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        pytest.param(_model(), 2, id="all calls agree"),
        pytest.param(_model(other="0.25"), 2, id="two scales, so the scale stays an input"),
        pytest.param(_model(scale="given"), 2, id="a scale that is given in one call"),
        pytest.param(_model(others="0, -1, 4, 2"), 1, id="shapes that differ, so no number of heads is known"),
    ],
)
def test_attention_in_a_function_whose_shapes_are_arguments(model: onnx.ModelProto, heads: int) -> None:
    result = onnx_attnfuse.optimize(model, verify="model")
    (site,) = result.report.sites
    assert (site.status, site.num_heads) == ("fused", heads)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 5, 8)).astype(np.float32) for name in "qkv"}
    feeds |= {"given": np.array(0.75, np.float32)} if len(model.graph.input) > 3 else {}
    (old,), (new,) = (run_in(session(proto), feeds).values() for proto in (model, result.model))
    np.testing.assert_allclose(new, old, atol=1e-5)


@pytest.mark.parametrize(("other", "count"), [("0.5", 5), ("0.25", 4), ("nan", 4)])
def test_inputs_that_all_calls_agree_in_are_counted(other: str, count: int) -> None:
    model = ir.from_proto(_model(other=other))
    assert embed_arguments(model) == count
    assert embed_arguments(model) == 0
    onnx.checker.check_model(ir.to_proto(model))


def test_a_constant_keeps_its_shape_and_type() -> None:
    head = '<ir_version: 10, opset_import: ["" : 18, "own" : 1]> g (float[2, 3] x) => (y, n) '
    body = "<int64 row = {1}, int8 half = {2}> { y, n = own.f(x, row, half) }"
    text = '<domain: "own", opset_import: ["" : 18]> f (x, row, half) => (y, n) { y = Gather<axis = 0>(x, row) n = Neg(half) }'
    model = ir.from_proto(onnx.parser.parse_model(f"{head}{body}{text}"))
    assert embed_arguments(model) == 2
    (function,) = model.functions.values()
    made = [node.attributes["value"].as_tensor() for node in function if node.op_type == "Constant"]
    assert {(tensor.dtype, tuple(tensor.shape.numpy())) for tensor in made} == {
        (ir.DataType.INT64, ()),
        (ir.DataType.INT8, ()),
    }
