"""Thresholds of masking against the arithmetic that they are about, and what a bias has to reach to count as a mask."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.mask_terms import element_of
from onnx_attnfuse.attention.masks.operators import literal, opaque
from onnx_attnfuse.certify.terms import Term, ite, make, number
from onnx_attnfuse.graph import thresholds
from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify.verdict import TIGHT


def leaves_nothing(low: float, score: float, dtype: type[np.floating]) -> bool:
    """Whether a score vanishes in a number that it is added to."""
    return all(dtype(low) + dtype(sign * score) == dtype(low) for sign in (1, -1))


@pytest.mark.parametrize(
    ("low", "vanishes", "stays", "dtype"),
    [
        (thresholds.ABSORBS, thresholds.ORDINARY, 65536.0, np.float32),
        (thresholds.ROUNDS_ALL, 31.0, 33.0, np.float32),
        (thresholds.ROUNDS_ALL_DOUBLE, 31.0, 33.0, np.float64),
        (thresholds.ABSORBS_HALF, 7.0, 9.0, np.float16),
        (thresholds.MASKS_ANY_SCORE, 1e22, 1e24, np.float32),
    ],
)
def test_a_number_absorbs_scores_up_to_half_the_distance_of_floats(
    low: float, vanishes: float, stays: float, dtype: type[np.floating]
) -> None:
    assert leaves_nothing(low, vanishes, dtype)
    assert not leaves_nothing(low, stays, dtype)


def test_from_where_masks_round_a_float32_score_changes_by_more_than_is_tolerated() -> None:
    above, below = (abs(float(np.spacing(np.float32(number)))) / 2 for number in (thresholds.ROUNDS, 1.03 * thresholds.ROUNDS))
    assert above < TIGHT < below


def test_below_the_last_exponential_there_is_nothing_but_zero_in_float32() -> None:
    assert np.float32(math.exp(thresholds.NO_EXPONENTIAL)) == 0
    assert np.float32(math.exp(thresholds.NO_EXPONENTIAL + 0.1)) > 0


def test_the_bounds_of_types_are_those_of_numpy() -> None:
    assert np.float32(thresholds.LOWEST_FLOAT32) == np.finfo(np.float32).min
    assert np.float16(thresholds.LARGEST_FLOAT16) == np.finfo(np.float16).max


FLOAT = ir.DataType.FLOAT
FED, BIAS = (element_of(ir.Value(name=name, type=ir.TensorType(FLOAT)), (), FLOAT) for name in ("fed", "bias"))
COMPUTED = element_of(ir.node("Gelu", [ir.Value(name="x")], domain="com.microsoft").outputs[0], (), FLOAT)
SELECTED = element_of(ir.Value(name="selected", type=ir.TensorType(ir.DataType.BOOL)), (), ir.DataType.BOOL)
UNDEFINED = element_of(ir.Value(name="undefined", const_value=ir.tensor([0.0, math.nan])), (number(0),), FLOAT)


def times(one: Term, other: Term) -> Term:
    return make("apply", "Real", (one, other), "Mul")


def chosen(then: float | Term, other: float | Term) -> Term:
    return ite(SELECTED, *(item if isinstance(item, Term) else literal(item) for item in (then, other)))


@pytest.mark.parametrize(
    ("bias", "may_mask"),
    [
        (literal(-1000.0), True),
        (literal(-999.0), False),
        (chosen(0.0, -1e9), True),
        (chosen(0.0, -900.0), False),
        (FED, True),
        (times(COMPUTED, COMPUTED), False),
        (times(COMPUTED, FED), True),
        (times(COMPUTED, times(COMPUTED, literal(16.0))), False),
        (times(COMPUTED, literal(1e4)), True),
        (times(COMPUTED, make("apply", "Real", (COMPUTED,), "Log")), True),
        (literal(math.nan), True),
        (chosen(0.0, UNDEFINED), True),
    ],
)
def test_a_bias_may_mask_a_key_from_minus_1000_down(bias: Term, may_mask: bool) -> None:
    assert Bounds(Facts(ir.Graph([], [], nodes=[]))).may_mask(bias) == may_mask


def test_without_the_assumption_on_fills_only_numbers_beyond_any_score_mask() -> None:
    assert Assumed().masked_from == thresholds.MASKS
    assert Assumed.of(["bounded-scores"]).masked_from == thresholds.MASKS_ANY_SCORE


def test_the_numbers_of_a_mask_are_those_of_every_choice() -> None:
    both = opaque("Add", (opaque("Add", (BIAS, chosen(0.0, -1e9)), FLOAT), chosen(0.0, -65504.0)), FLOAT)
    assert outcomes(both) == {0.0, -1e9, -65504.0, -1e9 - 65504.0}
    held = opaque("Max", (both, literal(-1e5)), FLOAT)
    assert outcomes(opaque("Mul", (held, literal(0.5)), FLOAT)) == {0.0, -32752.0, -5e4}
