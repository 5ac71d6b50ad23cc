"""Gelus of half precision for CUDA: with their bias, or with zeros, by the kernel that reads several numbers at a time."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from tests.support.bundled import run

_TEXT = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
model ({type}[b, s, 8] x) => ({type}[b, s, 8] seen, {type}[b, s, 8] y)
{{ kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) weights = Softmax<axis = -1>(small)
   seen = MatMul(weights, x) {nodes} }}"""
_NUMBERS = {"root": np.sqrt(np.asarray(2.0)), "one": np.asarray(1.0), "mid": np.asarray(0.5)}
_SPELLED = "d = Div(seen, root) e = Erf(d) p = Add(e, one) m = Mul(seen, p) y = Mul(m, mid)"
_KINDS = {"float": np.float32, "float16": np.float16}


def _model(nodes: str, kind: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_TEXT.format(type=kind, nodes=nodes))
    for name, array in {"bias": np.arange(8), "scale": np.asarray(0.35), **_NUMBERS}.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(_KINDS[kind]), name))
    return model


@pytest.mark.parametrize(
    ("nodes", "kind", "ep", "bias"),
    [
        pytest.param("y = Gelu(seen)", "float16", "cuda", np.zeros(8), id="zeros"),
        pytest.param(_SPELLED, "float16", "cuda", np.zeros(8), id="spelled out"),
        pytest.param("sum = Add(seen, bias) y = Gelu(sum)", "float16", "cuda", np.arange(8), id="its bias"),
        pytest.param('y = Gelu<approximate = "tanh">(seen)', "float16", "cuda", None, id="the approximate Gelu"),
        pytest.param("y = Gelu(seen)", "float", "cuda", None, id="float32"),
        pytest.param("y = Gelu(seen)", "float16", "cpu", None, id="a CPU"),
    ],
)
def test_gelus_get_a_bias_where_a_kernel_is_faster_with_one(nodes: str, kind: str, ep: str, bias: np.ndarray | None) -> None:
    before = _model(nodes, kind)
    result = onnx_attnfuse.optimize(before, ep=ep, verify="sites")
    assert (result.report.fused, result.report.differing, result.report.failures) == (1, 0, ())
    found = [node for node in result.model.graph.node if node.op_type == "BiasGelu"]
    assert len(found) == (bias is not None)
    if bias is not None:
        (added,) = (item for item in result.model.graph.initializer if item.name == found[0].input[1])
        np.testing.assert_array_equal(numpy_helper.to_array(added), bias)
        assert collections.Counter(node.op_type for node in result.model.graph.node)["Gelu"] == 0
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(_KINDS[kind])
    wanted, got = run(before, {"x": x}), run(result.model, {"x": x})
    np.testing.assert_allclose(got["y"].astype(np.float32), wanted["y"].astype(np.float32), rtol=2e-3, atol=2e-3)
