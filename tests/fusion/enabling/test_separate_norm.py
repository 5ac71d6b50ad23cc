"""A residual sum that is only normalized stays apart from its normalization on the CPU, and nothing else is changed."""

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
<float[8] gain = {{1, 2, 3, 4, 5, 6, 7, 8}}, float[8] shift = {{8, 7, 6, 5, 4, 3, 2, 1}}, float scale = {{0.35}}>
{{ kt = Transpose<perm=[0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) weights = Softmax<axis=-1>(small)
   mixed = MatMul(weights, x) {total} out = LayerNormalization<axis=-1>(total, gain, shift) }}"""
_SUM = "total = Add(mixed, x)"


def _model(total: str, outputs: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(_TEXT.format(total=total, outputs=outputs))


def _counts(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def _run(model: onnx.ModelProto, folder: pathlib.Path) -> tuple[collections.Counter[str], np.ndarray]:
    """The operators that ONNX Runtime makes of a model, and its output."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    result = np.asarray(session.run(["out"], {"x": x})[0])
    return _counts(onnx.load(options.optimized_model_filepath)), result


def test_onnxruntime_makes_one_slow_operator_of_the_source_and_none_of_the_result(tmp_path: pathlib.Path) -> None:
    model = _model(_SUM)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    before, wanted = _run(model, tmp_path)
    after, found = _run(result.model, tmp_path)
    assert result.report.fused == 1
    assert (before["SkipLayerNormalization"], after["SkipLayerNormalization"]) == (1, 0)
    assert after["LayerNormalization"] == 1
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert any(note.startswith("1 residual Adds kept apart") for note in result.report.notes)


def test_a_second_run_finds_nothing_left_to_do() -> None:
    once = onnx_attnfuse.optimize(_model(_SUM), ep="cpu").model
    assert _counts(once)["Sum"] == 1
    again = onnx_attnfuse.optimize(once, ep="cpu")
    assert _counts(again.model) == _counts(once)
    assert not [note for note in again.report.notes if "kept apart" in note]


@pytest.mark.parametrize(
    ("total", "outputs"),
    [
        (_SUM, ", float[b, s, 8] total"),
        (f"{_SUM} other = Relu(total)", ", float[b, s, 8] other"),
        ("total = Add(mixed, gain)", ""),
        ("total = Mul(mixed, x)", ""),
    ],
    ids=["the sum is an output", "the sum goes on", "a bias is added", "a product"],
)
def test_what_onnxruntime_keeps_apart_by_itself_is_left_as_it_is(total: str, outputs: str) -> None:
    model = _model(total, outputs)
    result = onnx_attnfuse.optimize(model, ep="cpu")
    assert result.report.fused == 1
    assert _counts(result.model)["Sum"] == 0
    assert _counts(result.model)["SkipLayerNormalization"] == 0


def test_a_gpu_gets_one_operator_where_the_sum_goes_on() -> None:
    model = _model(f"{_SUM} other = Relu(total)", ", float[b, s, 8] other")
    counts = _counts(onnx_attnfuse.optimize(model, ep="cuda", verify="none").model)
    assert (counts["SkipLayerNormalization"], counts["Add"]) == (1, 0)
