"""Biases of projections are taken into the operator on a GPU, and only where nothing else needs the sum."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse

pytestmark = pytest.mark.usefixtures("biases_stay")

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, s, 16] x, float[b, t, 16] y) => (float[b, s, 16] out{outputs})
<int64[4] split = {{0, 0, 2, 8}}, int64[3] flat = {{0, 0, 16}}, float scale = {{0.35}}>
{{ q0 = MatMul(x, wq) k0 = MatMul(y, wk) v0 = MatMul(y, wv) q1 = Add(q0, bq) k1 = {key} v1 = Add(bv, v0)
   q2 = Reshape(q1, split) k2 = Reshape(k1, split) v2 = Reshape(v1, split) q = Transpose<perm=[0, 2, 1, 3]>(q2)
   k = Transpose<perm=[0, 2, 3, 1]>(k2) v = Transpose<perm=[0, 2, 1, 3]>(v2) qk = MatMul(q, k) scaled = Mul(qk, scale)
   weights = Softmax<axis=-1>(scaled) mixed = MatMul(weights, v) back = Transpose<perm=[0, 2, 1, 3]>(mixed)
   out = Reshape(back, flat) {more} }}"""


def _model(key: str = "Add(k0, bk)", outputs: str = "", more: str = "") -> onnx.ModelProto:
    model = onnx.parser.parse_model(_TEXT.format(key=key, outputs=outputs, more=more))
    rng = np.random.default_rng(0)
    for name in ("bq", "bk", "bv", "wq", "wk", "wv"):
        shape = (16,) if name.startswith("b") else (16, 16)
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    return model


def _operator(model: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = [node for node in model.graph.node if node.op_type == "MultiHeadAttention"]
    return node


@pytest.mark.parametrize(
    ("parts", "ep", "taken"),
    [
        ({}, "cuda", ["q0", "k0", "v0", "attnfuse/projection_bias"]),
        ({"key": "Identity(k0)"}, "cuda", ["q0", "k0", "v0", "attnfuse/projection_bias"]),
        ({}, "cpu", ["q1", "k1", "v1"]),
        (
            {"outputs": ", float[b, s, 16] more", "more": "more = Identity(v1)"},
            "cuda",
            ["q0", "k0", "v1", "attnfuse/projection_bias"],
        ),
        ({"key": "Mul(k0, bk)"}, "cuda", ["q0", "k1", "v0", "attnfuse/projection_bias"]),
    ],
)
def test_which_biases_are_taken(parts: dict[str, str], ep: str, taken: list[str]) -> None:
    model = _model(**parts)
    fused = onnx_attnfuse.optimize(model, ep=ep, verify="sites").model
    assert list(_operator(fused).input) == taken
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((2, 5, 16), np.float32), "y": rng.standard_normal((2, 7, 16), np.float32)}
    old, new = (onnxruntime.InferenceSession(item.SerializeToString()).run(None, feeds)[0] for item in (model, fused))
    np.testing.assert_allclose(new, old, atol=2e-4)
    names = {item.name for item in fused.graph.initializer}
    assert names >= set(taken[3:])


def test_the_bias_of_each_stands_in_its_place() -> None:
    fused = onnx_attnfuse.optimize(_model(key="Identity(k0)"), ep="cuda").model
    (bias,) = [onnx.numpy_helper.to_array(item) for item in fused.graph.initializer if item.name == "attnfuse/projection_bias"]
    originals = {item.name: onnx.numpy_helper.to_array(item) for item in _model().graph.initializer}
    np.testing.assert_array_equal(bias, np.concatenate([originals["bq"], np.zeros(16, np.float32), originals["bv"]]))


@pytest.mark.parametrize("heads", ["1", "2"])
def test_rows_whose_scores_are_to_be_equal_get_the_opposite_of_their_bias(heads: str) -> None:
    text = _TEXT.format(key="Add(k0, bk)", outputs="", more="").replace(
        "weights = Softmax<axis=-1>(scaled)",
        "kept = Where(seen, scaled, low) biased = Add(kept, more) weights = Softmax<axis=-1>(biased)",
    )
    text = text.replace("y) =>", f"y, bool[b, {heads}, 1, t] seen) =>")
    text = text.replace("float scale = {0.35}", "float scale = {0.35}, float low = {-10000}, float[1, 2, 1, 1] more = {1, 2}")
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(item for item in _model().graph.initializer if item.name[0] in "bw")
    fused = onnx_attnfuse.optimize(model, ep="cuda", verify="none").model
    assert list(_operator(fused).input)[1:4] == ["k0", "v0", "attnfuse/projection_bias"]
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((2, 5, 16), np.float32), "y": rng.standard_normal((2, 7, 16), np.float32)}
    feeds["seen"] = rng.random((2, int(heads), 1, 7)) > 0.3
    feeds["seen"][0] = False
    old, new = (onnxruntime.InferenceSession(item.SerializeToString()).run(None, feeds)[0] for item in (model, fused))
    np.testing.assert_allclose(new, old, atol=2e-3)
