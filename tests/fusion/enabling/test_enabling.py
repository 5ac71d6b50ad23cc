"""Rewrites around the attention: each lets a fusion of ONNX Runtime's fire, and computes the same."""

from __future__ import annotations

import collections
import pathlib

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse
from tests.support.bundled import BUNDLED

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, s, 8] x) => (float[b, s, 8] out{outputs})
<float two = {{2}}, float eps = {{0.00001}}, int64[1] last = {{-1}}, float[8] weight = {{1, 2, 3, 4, 5, 6, 7, 8}},
 float scale = {{0.35}}>
{{ squared = Pow(x, two) mean = ReduceMean(squared, last) shifted = Add(mean, eps) {norm}
   normal = Mul(weight, scaled) kt = Transpose<perm=[0, 2, 1]>(normal) qk = MatMul(normal, kt) small = Mul(qk, scale)
   weights = Softmax<axis=-1>(small) out = MatMul(weights, normal) }}"""
_RECIPROCAL = "root = Sqrt(shifted) inverse = Reciprocal(root) scaled = Mul(x, inverse)"


def _model(norm: str, outputs: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(_TEXT.format(norm=norm, outputs=outputs))


def _optimised(model: onnx.ModelProto, folder: pathlib.Path) -> tuple[collections.Counter[str], np.ndarray]:
    """The operators that ONNX Runtime makes of a model, and its output."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    result = np.asarray(session.run(["out"], {"x": x})[0])
    return collections.Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node), result


def test_onnxruntime_fuses_the_normalization_only_afterwards(tmp_path: pathlib.Path) -> None:
    model = _model(_RECIPROCAL)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    before, wanted = _optimised(model, tmp_path)
    after, found = _optimised(result.model, tmp_path)
    assert (before["SimplifiedLayerNormalization"], after["SimplifiedLayerNormalization"]) == (0, 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert any(note.startswith("1 x * (1 / r) rewritten") for note in result.report.notes)


@pytest.mark.parametrize(
    ("norm", "outputs"),
    [
        ("root = Sqrt(shifted) scaled = Div(x, root)", ""),
        ("inverse = Reciprocal(shifted) scaled = Mul(x, inverse)", ""),
        (_RECIPROCAL, ", float[b, s, 1] inverse"),
        (_RECIPROCAL, ", float[b, s, 1] root"),
        ("root = Sqrt(shifted) inverse = Reciprocal(root) twice = Add(inverse, inverse) scaled = Mul(x, twice)", ""),
    ],
    ids=["a quotient", "no root", "the reciprocal is an output", "the root is an output", "more is done to it"],
)
def test_what_is_left_as_it_is(norm: str, outputs: str) -> None:
    model = _model(norm, outputs)
    result = onnx_attnfuse.optimize(model, ep="cpu")
    assert result.report.fused == 1
    assert result.report.notes == ()
    kept = {"Reciprocal", "Sqrt", "Div"}
    before, after = (
        collections.Counter(node.op_type for node in item.graph.node if node.op_type in kept) for item in (model, result.model)
    )
    assert before == after


def test_without_an_attention_nothing_is_touched() -> None:
    text = _TEXT.format(norm=_RECIPROCAL, outputs="").replace("weights = Softmax<axis=-1>(small)", "weights = Identity(small)")
    model = onnx.parser.parse_model(text)
    result = onnx_attnfuse.optimize(model, ep="cpu")
    assert "Reciprocal" in [node.op_type for node in result.model.graph.node]


_HEADS = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v) => (float[b, s, 6] out)
<int64[2] flat = {-1, 8}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] width = {6}>
{ kt = Transpose<perm = [0, 1, 3, 2]>(k) qk = MatMul(q, kt) weights = Softmax<axis = -1>(qk) mixed = MatMul(weights, v)
  swapped = Transpose<perm = [0, 2, 1, 3]>(mixed) rows = Reshape(swapped, flat)
  projected = Gemm<alpha = %s>(rows, w, c)
  shape = Shape(swapped) b1 = Slice(shape, zero, one) s1 = Slice(shape, one, two) to = Concat<axis = 0>(b1, s1, width)
  out = Reshape(projected, to) }"""


@pytest.mark.parametrize(("alpha", "left"), [("1.0", 0), ("0.5", 1)])
def test_the_output_projection_is_split_once_heads_are_joined_by_the_operator(alpha: str, left: int) -> None:
    model = onnx.parser.parse_model(_HEADS % alpha)
    random = np.random.default_rng(0)
    for name, dims in (("w", (8, 6)), ("c", (6,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(random.standard_normal(dims).astype(np.float32), name))
    result = onnx_attnfuse.optimize(model, ep="cuda")
    assert result.report.fused == 1
    assert [node.op_type for node in result.model.graph.node].count("Gemm") == left
    feeds = {name: random.standard_normal((2, 2, 5, 4)).astype(np.float32) for name in "qkv"}
    old, new = (onnxruntime.InferenceSession(item.SerializeToString()).run(None, feeds)[0] for item in (model, result.model))
    np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)


def test_what_stands_around_attention_in_float16_is_judged_for_a_gpu_too() -> None:
    """A GPU's rounding is tried in references of attention; other operators are run by ONNX Runtime."""
    half = onnx_attnfuse.convert(onnx.load(next(path for path in BUNDLED if path.stem.startswith("vit")))).model
    result = onnx_attnfuse.optimize(half, ep="cuda", arch="sm90", verify="sites")
    assert (result.report.fused, result.report.differing) == (2, 0)
    found = collections.Counter(node.op_type for node in result.model.graph.node)
    assert (found["SkipLayerNormalization"], found["BiasGelu"]) == (3, 2)
