"""Sums of float32 and float16 that leave other digits of a score where they are added in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import element, split_added
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.mask_terms import bare, elements_of, value_of
from onnx_attnfuse.attention.masks.operators import branches
from onnx_attnfuse.attention.spec import Added, Gain, Mask, MaskStep, Scaled, step_gains
from onnx_attnfuse.certify.terms import Term, make
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.thresholds import ABSORBS, MASKS, ROUNDS, ROUNDS_ALL

ROUNDED_AWAY = 32.0
"""Scores up to this are rounded away by numbers from `ROUNDS_ALL` down."""


def is_near_next_float(number: float) -> bool:
    """Whether an ordinary score beside a sum of float32 may bring it to the float next to that which the numbers alone give.

    -1e9 - 1e4 lies 16 from a float, and floats lie 64 apart there: a score of -17 brings it to the next.
    """
    if number <= ABSORBS:
        return False
    nearest = np.float32(number)
    return abs(number - float(nearest)) + ROUNDED_AWAY > abs(float(np.spacing(nearest))) / 2


def rounded_before_scaling(mask: Mask, reader: Reader, bounds: Bounds) -> float | None:
    """A number whose sum with a score is rounded visibly before it is multiplied."""
    last = max((place for place, step in enumerate(mask) if is_scaling(step)), default=0)
    sums = [split_added(step, Gain(), reader, MASKS) for step in mask[:last] if isinstance(step, Added)]
    numbers = [fill for parts in sums for fill in parts.fills if fill > ROUNDS_ALL]
    numbers += [bounds.of_term(bias)[0] for parts in sums for bias in parts.biases]
    return next((number for number in numbers if number < ROUNDS), None)


def rounded_among(mask: Mask, reader: Reader, bounds: Bounds, absorbs: float) -> float | None:
    """One of several numbers that a step is known to add, which rounds scores visibly beside the numbers that other steps add."""
    for step, gain in zip(mask, step_gains(mask), strict=True):
        if not isinstance(step, Added):
            continue
        parts = split_added(step, gain, reader, MASKS)
        several = set(parts.fills) if len(parts.fills) > 1 or parts.adds_unread_amount else set[float]()
        if len(several) > 1:
            several.add(lowest_sum(step, reader, bounds) * abs(gain.number))
        numbers = several.union(*(_known_numbers(bias, bounds) for bias in parts.biases))
        for number in sorted(number / abs(gain.number) for number in numbers if gain.number):
            if absorbs < number < ROUNDS and (number > ROUNDS_ALL or is_near_next_float(number)):
                return number
    return None


def _known_numbers(bias: Term, bounds: Bounds) -> set[float]:
    """Numbers that a bias comes to by the constants of the model; values computed from activations are ordinary numbers."""
    is_constant = all(constant_tensor(value_of(element)) is not None for element in elements_of(bias))
    return {bounds.of_term(bias)[0], *outcomes(bias)} if is_constant else {*outcomes(bias)}


def is_scaling(step: MaskStep) -> bool:
    """Whether a step multiplies by a factor that changes the digits: none that is a power of two."""
    return isinstance(step, Scaled) and (isinstance(step.factor, IndexedValue) or abs(math.frexp(step.factor)[0]) != 0.5)


def is_summed_in_half(step: MaskStep, others: Sequence[MaskStep], reader: Reader, bounds: Bounds) -> bool:
    """Whether a float16 mask is summed with another or a bias so that it is rounded, or goes through further steps.

    A CPU rounds such sums in some places only.
    """
    if not isinstance(step, Added) or reader.facts.dtype(step.indexed.value) != ir.DataType.FLOAT16:
        return False
    if len(others) > 1:
        return True
    parts = split_added(step, Gain(), reader, MASKS)
    computed = [bias for bias in parts.biases if bare(bias).op != "element"]
    if len(parts.biases) > 1 and any(map(bounds.may_mask, parts.biases)):
        return True
    lowest = lowest_sum(step, reader, bounds)
    return bool(parts.biases and parts.fills) or any(map(bounds.may_mask, computed)) or _in_half(lowest) != lowest


def lowest_sum(step: Added, reader: Reader, bounds: Bounds) -> float:
    """The lowest finite number that a step adds to a score, as several masks in one sum may."""
    part = element(step.indexed, reader)
    return _lowest_sum(make("apply", "Real", (part,), "Neg") if step.negative else part, bounds)


def _lowest_sum(part: Term, bounds: Bounds) -> float:
    if part.op == "ite":
        return min(_lowest_sum(branch, bounds) for branch in branches(part))
    if part.data == "Add":
        return sum(_lowest_sum(argument, bounds) for argument in part.args)
    low = bounds.of_term(part)[0]
    return low if math.isfinite(low) else 0.0


def _in_half(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float16(number))
