"""The lowest number in a mask of ai.onnx Attention: -inf to ONNX Runtime's kernel, which takes masks of full shape only."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse

_LOWEST = np.finfo(np.float32).min


def _model(rows: object, columns: object, mask: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[2, 2, {rows}, 8] q, float[2, 2, {columns}, 8] k, float[2, 2, {columns}, 8] v, float[2, 1, {mask}] m)
        => (float[2, 2, {rows}, 8] y) {{ y = Attention(q, k, v, m) }}""")


def _run(model: onnx.ModelProto, rows: int, columns: int) -> np.ndarray:
    """The result where the lowest number masks every key of the first entry."""
    rng = np.random.default_rng(5)
    feeds = {name: 2 * rng.standard_normal((2, 2, columns, 8), np.float32) for name in "kv"}
    feeds["q"] = rng.standard_normal((2, 2, rows, 8), np.float32)
    feeds["m"] = np.zeros((2, 1, rows, columns), np.float32)
    feeds["m"][0] = _LOWEST
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_a_mask_as_large_as_the_scores_takes_it_for_infinity(rows: int, columns: int) -> None:
    model = _model(rows, columns, f"{rows}, {columns}")
    result = onnx_attnfuse.optimize(model, ep="cpu", target="MultiHeadAttention", verify="none")
    assert [site.op for site in result.report.sites] == ["MultiHeadAttention"]
    expected = _run(model, rows, columns)
    assert not expected[0].any()
    np.testing.assert_allclose(_run(result.model, rows, columns), expected, atol=1e-6)


def test_a_mask_that_is_repeated_for_some_lengths_only_is_left() -> None:
    result = onnx_attnfuse.optimize(_model("s", "t", "1, t"), ep="cpu", target="MultiHeadAttention", verify="none")
    (site,) = result.report.sites
    assert (site.op, site.reasons[0].code) == ("Attention", "kernels-disagree")
