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


_HALF = """<ir_version: 10, opset_import: ["" : 23]>
g (float16[b, 2, s, 8] q, float16[b, 2, s, 8] k, float16[b, 2, s, 8] v, bool[b, 1, s, s] near, bool[b, 1, s, s] kept)
=> (float16[b, 2, s, 8] y)
<float nothing = {0}, float number = {%s}, float large = {-3e38}>
{ none = Cast<to=10>(nothing) low = Cast<to=10>(number) twice = Add(large, large) inf = Cast<to=10>(twice)
  one = Where(near, none, low) other = Where(kept, none, inf) m = Add(one, other) y = Attention(q, k, v, m) }"""


@pytest.mark.parametrize(
    ("lowest", "verify"),
    [
        pytest.param(True, "none", id="the lowest"),
        pytest.param(True, "sites", id="the lowest, verified"),
        pytest.param(False, "sites", id="one above it, which the kernel rounds scores beside"),
    ],
)
def test_the_lowest_number_is_that_of_the_type_of_the_mask(lowest: bool, verify: str) -> None:
    model = onnx.parser.parse_model(_HALF % ("-65504" if lowest else "-65440"))
    result = onnx_attnfuse.optimize(model, ep="cpu", verify=verify)
    rng = np.random.default_rng(5)
    feeds: dict[str, np.ndarray] = {name: 2 * rng.standard_normal((2, 2, 5, 8)).astype(np.float16) for name in "qkv"}
    feeds |= {name: np.ones((2, 1, 5, 5), bool) for name in ("near", "kept")}
    feeds["near"][0, 0, 1, 1:], feeds["kept"][0, 0, 1, 0] = False, False  # both mask, each some keys
    feeds["near"][1, 0, 4] = False
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    old, new = (
        onnxruntime.InferenceSession(item.SerializeToString(), options).run(None, feeds)[0] for item in (model, result.model)
    )
    assert old[0, :, 1].any() != lowest
    np.testing.assert_allclose(new, old, atol=8e-3)
    assert (result.report.fused == 1) == lowest
