"""Rows without a key in half types, whose lowest number leaves something of a score that is added to it in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from tests.support.bundled import run_in, session

_MODEL = """<ir_version: 10, opset_import: ["" : 18]>
attention (float16[2, 2, 3, 4] q, float16[2, 2, 3, 4] k, float16[2, 2, 3, 4] v, bool[2, 1, 1, 3] mask) => (float16[2, 2, 3, 4] o)
<float16 zero = {0}, float number = {%s}, float floor = {%s}>
{ low = Cast<to = 10>(number) least = Cast<to = 10>(floor) kt = Transpose<perm = [0, 1, 3, 2]>(k) scores = MatMul(q, kt)
  replaced = Where(mask, scores, low) added = Where(mask, zero, low) summed = Add(scores, added)
  held = Max(%s, least) weights = Softmax<axis = -1>(held) o = MatMul(weights, v) }"""


def _model(number: str, floor: str, masked: str) -> onnx.ModelProto:
    text = _MODEL % (number, floor, masked)
    needless = "replaced = Where(mask, scores, low)" if masked == "summed" else text[text.index("added =") : text.index("  held")]
    return onnx.parser.parse_model(text.replace(needless, ""))


@pytest.mark.parametrize("floor", ["-10000", "-65504"])
def test_scores_that_are_replaced_and_held_above_a_number_have_equal_weights(floor: str) -> None:
    model = _model("-inf", floor, "replaced")
    result = onnx_attnfuse.optimize(model, verify="none")
    assert result.report.fused == 1
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 2, 3, 4)).astype(np.float16) for name in "qkv"}
    feeds["mask"] = np.array([[1, 0, 1], [0, 0, 0]], bool)[:, None, None]
    (new,) = run_in(session(result.model), feeds).values()
    mean = feeds["v"][1].mean(axis=1, keepdims=True, dtype=np.float32)
    np.testing.assert_allclose(new[1], np.broadcast_to(mean, new[1].shape), atol=2e-3)
    (old,) = run_in(session(model), feeds).values()
    np.testing.assert_allclose(new, old, atol=2e-3)


@pytest.mark.parametrize(
    ("number", "floor", "fused"),
    [
        pytest.param("-inf", "-2000", 1, id="a floor above what float16 absorbs"),
        pytest.param("-65504", "-2000", 1, id="so with a finite mask"),
        pytest.param("-2000", "-2500", 0, id="a floor among the numbers of masked keys"),
    ],
)
def test_a_floor_levels_rows_on_a_gpu_too(number: str, floor: str, fused: int) -> None:
    chosen: dict[str, Any] = {"verify": "sites", "ep": "cuda", "arch": "sm90"}
    report = onnx_attnfuse.optimize(_model(number, floor, "summed"), **chosen).report
    assert report.fused == fused
    codes = {reason.code for site in report.sites for reason in site.reasons}
    assert codes == (set() if fused else {"floor-near-fill"})


@pytest.mark.parametrize("scored", [pytest.param(True, id="added to"), pytest.param(False, id="replaced")])
def test_a_query_of_nan_survives_in_a_level_row_where_its_score_does(scored: bool) -> None:
    model = _model("-65504", "-inf", "summed" if scored else "replaced")
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", verify="none")
    assert result.report.fused == 1
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 2, 3, 4)).astype(np.float16) for name in "qkv"}
    feeds["mask"] = np.array([[1, 0, 1], [0, 0, 0]], bool)[:, None, None]
    feeds["q"][1, 0, 1, 2] = np.nan
    (new,) = run_in(session(result.model), feeds).values()
    assert np.argwhere(np.isnan(new).any(axis=-1)).tolist() == ([[1, 0, 1]] if scored else [])
    (old,) = run_in(session(model), feeds).values()
    np.testing.assert_array_equal(np.isnan(new), np.isnan(old))
    mean = feeds["v"].mean(axis=2, keepdims=True, dtype=np.float32)[1]
    np.testing.assert_allclose(new[1, :, ::2], np.broadcast_to(mean, (2, 2, 4)), atol=2e-3)
