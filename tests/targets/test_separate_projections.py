"""One product of queries, keys and values becomes three on a GPU, where nothing else needs it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse

pytestmark = pytest.mark.usefixtures("biases_stay")

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, s, 16] x{inputs}) => (float[b, s, 16] out{outputs})
<int64[5] parts = {{{parts}}}, int64[3] flat = {{0, 0, 16}}, float scale = {{0.35}}>
{{ p0 = MatMul({weight}) p = {bias} p5 = Reshape(p, parts) turned = Transpose<perm=[{order}]>(p5)
   i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() i2 = Constant<value_int=2>()
   q = Gather<axis=0>(turned, i0) k0 = Gather<axis=0>(turned, i1) v = Gather<axis=0>(turned, i2)
   k = Transpose<perm=[0, 1, 3, 2]>(k0) qk = MatMul(q, k) scaled = Mul(qk, scale) {mask}
   weights = Softmax<axis=-1>(masked) mixed = MatMul(weights, v)
   back = Transpose<perm=[0, 2, 1, 3]>(mixed) out = Reshape(back, flat) {more} }}"""
_PARTS = {"by part": ("0, 0, 3, 2, 8", "2, 0, 3, 1, 4"), "by head": ("0, 0, 2, 3, 8", "3, 0, 2, 1, 4")}
_BIASED, _PLAIN = "Add(p0, b0)", "Identity(p0)"


def _model(
    packed: str = "by part", bias: str = _BIASED, mask: str = "masked = Identity(scaled)", **parts: str
) -> onnx.ModelProto:
    shape, order = _PARTS[packed]
    given = {"inputs": "", "outputs": "", "more": "", "weight": "x, w0", **parts}
    model = onnx.parser.parse_model(_TEXT.format(parts=shape, order=order, bias=bias, mask=mask, **given))
    rng = np.random.default_rng(0)
    for name, dims in (("w0", (16, 48)), ("b0", (48,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(dims, np.float32), name))
    return model


def _fused(model: onnx.ModelProto, ep: str) -> onnx.ModelProto:
    result = onnx_attnfuse.optimize(model, ep=ep, target="MultiHeadAttention", verify="sites")
    assert (result.report.fused, result.report.differing) == (1, 0)
    return result.model


def _operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def _outputs(model: onnx.ModelProto, **more: np.ndarray) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((2, 5, 16), np.float32)
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString()).run(["out"], {"x": x, **more})[0])


@pytest.mark.parametrize("packed", list(_PARTS))
@pytest.mark.parametrize("bias", [_BIASED, _PLAIN], ids=["biased", "plain"])
def test_each_operand_gets_a_product_of_its_own_columns(packed: str, bias: str) -> None:
    model = _model(packed, bias)
    fused = _fused(model, "cuda")
    assert _operators(fused) == ["MatMul", "MatMul", "MatMul", "MultiHeadAttention"]
    assert bool(fused.graph.node[3].input[3:]) is (bias == _BIASED)
    np.testing.assert_allclose(_outputs(fused), _outputs(model), atol=1e-4)
    sizes = {item.name: tuple(item.dims) for item in fused.graph.initializer}
    assert [sizes[node.input[1]] for node in fused.graph.node[:3]] == [(16, 16)] * 3
    assert "w0" not in sizes


@pytest.mark.parametrize(
    ("ep", "parts"),
    [
        ("cpu", {}),
        ("cuda", {"outputs": ", float[b, s, 48] more", "more": "more = Identity(p0)"}),
        ("cuda", {"inputs": ", float[16, 48] w", "weight": "x, w"}),
    ],
    ids=["on a CPU", "the product is needed elsewhere", "the weight is given"],
)
def test_the_product_that_stays_whole(ep: str, parts: dict[str, str]) -> None:
    fused = _fused(_model(**parts), ep)
    assert _operators(fused).count("MatMul") == 1


@pytest.mark.parametrize("packed", list(_PARTS))
def test_rows_without_a_key_are_level_beside_biases(packed: str) -> None:
    mask = "masked = Where(seen, scaled, low)"
    model = _model(packed, mask=mask, inputs=", bool[b, 1, s, s] seen")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(-10000), "low"))
    fused = _fused(model, "cuda")
    assert _operators(fused).count("MatMul") == 3
    seen = np.random.default_rng(2).random((2, 1, 5, 5)) < 0.5
    seen[:, :, 2] = False
    np.testing.assert_allclose(_outputs(fused, seen=seen), _outputs(model, seen=seen), atol=1e-4)
