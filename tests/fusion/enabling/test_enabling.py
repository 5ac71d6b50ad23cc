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
    assert any(note.startswith("1 products with a reciprocal") for note in result.report.notes)


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
