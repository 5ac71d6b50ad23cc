"""Models that ONNX Runtime refuses as they were exported, and runs once they are mended."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as errors

import onnx_attnfuse

_ROTARY = """<ir_version: 10, opset_import: ["" : 23]>
model (float[{batch}, 2, s, 8] x, float[{caches}, s, 4] cosine, float[{caches}, s, 4] sine) => (float[{batch}, 2, s, 8] y)
{{ y = RotaryEmbedding<interleaved={interleaved}>(x, cosine, sine) }}"""


def _run(model: onnx.ModelProto, caches: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((3, 2, 5, 8), np.float32),
        "cosine": rng.standard_normal((caches, 5, 4), np.float32),
        "sine": rng.standard_normal((caches, 5, 4), np.float32),
    }
    expected = onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0]
    return [onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0], expected]


@pytest.mark.parametrize("interleaved", [0, 1])
def test_caches_of_batch_one_are_repeated(interleaved: int) -> None:
    model = onnx.parser.parse_model(_ROTARY.format(batch="b", caches=1, interleaved=interleaved))
    with pytest.raises(errors.InvalidArgument):
        _run(model, 1)
    result = onnx_attnfuse.optimize(model)
    assert result.report.notes == ("1 RotaryEmbedding caches expanded to the whole batch, as ONNX Runtime requires",)
    actual, expected = _run(result.model, 1)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(("batch", "caches"), [("b", "b"), ("1", "1")])
def test_caches_that_fit_are_left_alone(batch: str, caches: str) -> None:
    model = onnx.parser.parse_model(_ROTARY.format(batch=batch, caches=caches, interleaved=0))
    result = onnx_attnfuse.optimize(model)
    assert result.report.notes == ()
    assert [node.op_type for node in result.model.graph.node] == ["RotaryEmbedding"]
