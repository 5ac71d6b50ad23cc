"""How replaced scores are written, by the numbers that masked keys have before Softmax."""

from __future__ import annotations

import dataclasses

import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.attention.masks.fully_masked import Fills, MaskedKey, MaskedKeys, choose_fills
from onnx_attnfuse.graph.thresholds import ABSORBS_HALF, LOWEST_FLOAT32
from onnx_attnfuse.reasons import Refused


@pytest.mark.parametrize(
    ("replaced", "added", "fills"),
    [
        pytest.param(LOWEST_FLOAT32, LOWEST_FLOAT32, "lowest", id="the lowest number stays what it is"),
        pytest.param(LOWEST_FLOAT32 / 3, LOWEST_FLOAT32 / 3, "exact", id="both are scaled alike afterwards"),
        pytest.param(LOWEST_FLOAT32 / 3, LOWEST_FLOAT32 / 4, "lowest", id="replaced scores lie below"),
        pytest.param(-1e9, -1e9, None, id="neither absorbs"),
    ],
)
def test_keys_with_equal_numbers_share_the_weight_of_a_row_whichever_step_masks_them(
    replaced: float, added: float, fills: Fills | None
) -> None:
    masked = MaskedKeys((MaskedKey(False, replaced, replaced), MaskedKey(True, added, added)))
    if fills is None:
        with pytest.raises(Refused, match="mix both"):
            choose_fills(masked)
    else:
        assert choose_fills(masked) == fills


@pytest.mark.parametrize(("number", "kept"), [(-1e3, False), (-1e4, True)])
def test_beside_a_bias_a_mask_of_float16_has_to_leave_nothing_of_scores_on_a_gpu(number: float, kept: bool) -> None:
    masked = MaskedKeys((MaskedKey(True, number, number),), summed_in_half=True)
    if kept:
        assert choose_fills(masked, ABSORBS_HALF) == "lowest"
    else:
        with pytest.raises(Refused, match="float16"):
            choose_fills(masked, ABSORBS_HALF)


@pytest.mark.parametrize(("low", "high", "kept"), [(-40000.0, -1000.0, False), (-40000.0, -8192.0, True)])
def test_a_float16_mask_that_is_multiplied_has_to_leave_nothing_of_scores(low: float, high: float, kept: bool) -> None:
    masked = MaskedKeys((MaskedKey(True, low, high),), summed_in_half=True, scaled=True)
    if kept:
        assert choose_fills(masked, ABSORBS_HALF) == "lowest"
    else:
        with pytest.raises(Refused, match="float16"):
            choose_fills(masked, ABSORBS_HALF)
    assert choose_fills(dataclasses.replace(masked, scaled=False), ABSORBS_HALF) == "lowest", (
        "it may be a mask of the lowest number"
    )


@pytest.mark.parametrize(("number", "kept"), [(-1e8, True), (-1e7, False), (-3e2, False), (-1.5e2, True)])
def test_what_left_nothing_of_a_score_leaves_nothing_of_its_part_either(number: float, kept: bool) -> None:
    masked = MaskedKeys((MaskedKey(True, number, number),), additions=2, gain=0.1)
    if kept:
        assert choose_fills(masked) == "lowest"
    else:
        with pytest.raises(Refused, match="order"):
            choose_fills(masked)


@pytest.mark.parametrize(("number", "kept"), [(-2e9, True), (-1e9 - 1e4, False), (-1e9 - 9984, True), (-1e12, True)])
def test_sums_of_two_numbers_absorb_a_score_where_they_lie_on_a_float(number: float, kept: bool) -> None:
    masked = MaskedKeys((MaskedKey(True, number, number),), additions=2)
    if kept:
        assert choose_fills(masked) == "lowest"
    else:
        with pytest.raises(Refused, match="order"):
            choose_fills(masked)


@pytest.mark.parametrize(("soft", "kept"), [(None, True), (-100.0, False)])
def test_a_number_that_masks_nothing_is_rounded_away_beside_a_mask_only_if_it_is_as_small_as_scores(
    soft: float | None, kept: bool
) -> None:
    masked = MaskedKeys((MaskedKey(True, -1e9, -1e9),), additions=2, soft=soft)
    if kept:
        assert choose_fills(masked) == "lowest"
    else:
        with pytest.raises(Refused, match="order"):
            choose_fills(masked)
    assert choose_fills(dataclasses.replace(masked, additions=1)) == "lowest", "what is summed before is the same sum"


@pytest.mark.parametrize(("weakest", "kept"), [(-1e3, False), (-1e4, True)])
def test_the_weakest_of_several_masks_in_one_float16_sum_has_to_leave_nothing_of_scores(weakest: float, kept: bool) -> None:
    masked = MaskedKeys((MaskedKey(True, -65504.0, weakest),), summed_in_half=True, weakest=weakest)
    if kept:
        assert choose_fills(masked, ABSORBS_HALF) == "lowest"
    else:
        with pytest.raises(Refused, match="float16"):
            choose_fills(masked, ABSORBS_HALF)


_HALF = """<ir_version: 10, opset_import: ["" : 18]>
attention (float16[2, 2, 3, 4] q, float16[2, 2, 3, 4] k, float16[2, 2, 3, 4] v, bool[2, 1, 1, 3] seen) => (float16[2, 2, 3, 4] o)
<float16 zero = {0}, float low32 = {%s}, bool[3, 3] causal = {1, 0, 0, 1, 1, 0, 1, 1, 1}, float[1, 2, 1, 1] more32 = {1, 2}>
{ low = Cast<to = 10>(low32) more = Cast<to = 10>(more32)
  kt = Transpose<perm = [0, 1, 3, 2]>(k) scores = MatMul(q, kt) mask = Where(%s, zero, low) masked = Add(scores, mask)
  biased = Add(masked, more) weights = Softmax<axis = -1>(%s) o = MatMul(weights, v) }"""


@pytest.mark.parametrize(
    ("low", "condition", "result", "fused"),
    [
        pytest.param(-100, "seen", "biased", 0, id="a row may have nothing else"),
        pytest.param(-100, "causal", "biased", 1, id="every row sees itself"),
        pytest.param(-100, "seen", "masked", 1, id="there is no other sum"),
        pytest.param(-20, "seen", "biased", 1, id="few digits are lost"),
    ],
)
def test_soft_numbers_round_a_sum_with_a_bias_in_float16(low: int, condition: str, result: str, fused: int) -> None:
    text = _HALF % (low, condition, result)
    text = text if result == "biased" else text.replace("biased = Add(masked, more) ", "")
    report = onnx_attnfuse.optimize(onnx.parser.parse_model(text), verify="none").report
    assert report.fused == fused
    codes = {reason.code for site in report.sites for reason in site.reasons}
    assert fused or "rounded-mask" in codes


_MODEL = """<ir_version: 10, opset_import: ["" : 18]>
attention (float[2, 2, 3, 4] q, float[2, 2, 3, 4] k, float[2, 2, 3, 4] v, bool[2, 1, 3, 3] seen) => (float[2, 2, 3, 4] out)
<float zero = {0}, float low = {-65504}, float half = {0.5}, float third = {0.3}>
{ kt = Transpose<perm = [0, 1, 3, 2]>(k) scores = MatMul(q, kt) mask = Where(seen, zero, low) masked = Add(scores, mask)
  last = %s weights = Softmax<axis = -1>(last) out = MatMul(weights, v) }"""


@pytest.mark.parametrize(
    ("last", "fused"),
    [
        pytest.param("Mul(masked, half)", 1, id="the digits stay the same"),
        pytest.param("Mul(masked, third)", 0, id="the product has others"),
        pytest.param("Add(masked, third)", 0, id="two sums"),
    ],
)
def test_numbers_that_are_not_taken_for_a_mask_round_scores_all_the_same(last: str, fused: int) -> None:
    model = onnx.parser.parse_model(_MODEL % last)
    report = onnx_attnfuse.optimize(model, verify="none", assume=("none",)).report
    assert report.fused == fused
    codes = {reason.code for site in report.sites for reason in site.reasons}
    assert fused or "rounded-mask" in codes
