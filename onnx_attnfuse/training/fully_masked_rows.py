"""Rows that see no key: their results in the source, forward and backward.

Kernels keep no weights but one number per row, the logarithm of its sum, and compute the weights anew from that in the backward
part. In a row that -3.4e38 masks throughout the mask has swallowed the logarithm: every weight comes out as 1 instead of 1/T, and
gradients are T times too large (measured on PyTorch's CPU kernel). So such rows are passed in a form that loses nothing:

    top is the largest number of a row's mask
    top <= -1000             bias - top in the place of the bias, which a softmax does not see
    top swallows any score   queries of 0, and so scores; -inf where the mask is lower than top, equal weights elsewhere
    the row is all -inf      queries of NaN, since the source gives NaN

Where numbers are added, scores have a gradient in such rows too, which queries of zeros do not give to the keys. A second call of
the backward kernel, with zeros as the keys instead and for these rows alone, gives the missing part.

Where numbers are put in the place of scores, these have no gradient: that of the queries is 0 in such rows, and the keys get
none. The values still get theirs, and of a row of -inf they get NaN.

Where rows of -inf are set to 0 after the softmax, as PyTorch itself does since 2.5, nothing has a gradient in them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.fully_masked import masked_keys
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.seen_keys import sees_a_key
from onnx_attnfuse.attention.match.score_form import replaces
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Mask, step_gains
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.thresholds import ABSORBS_HALF, MASKS, ROUNDS, ROUNDS_ALL, ROUNDS_ALL_DOUBLE, ROUNDS_DOUBLE
from onnx_attnfuse.reasons import Refused

Treatment = Literal["none", "added", "replaced", "zeroed", "added or zeroed"]
"""The treatment of rows without a key: none, since there are none; or that for numbers that are added to the scores, or put in
their place, which stops the gradient; or zeros, of all such rows or of those where the numbers are -inf."""


@dataclasses.dataclass(frozen=True)
class Levelled:
    """A bias that is exact in fully masked rows too, and which rows these are."""

    bias: IndexedValue
    fully_masked: ir.Value
    """(b or 1, n or 1, s or 1, 1): the mask swallows all scores of the row."""
    all_infinite: ir.Value
    """(b or 1, n or 1, s or 1, 1): the mask of the row is -inf throughout."""

    @property
    def axes(self) -> Axes:
        """The axes of the tests."""
        return (*self.bias.axes[:3], ())


def treatment(spec: AttentionSpec, meaning: Meaning, reader: Reader, bounds: Bounds, *, zeroed: bool = False) -> Treatment:
    """The treatment that rows without a key need, from the analysis of such rows that every fusing goes by.

    Args:
        spec: The attention.
        meaning: Its mask.
        reader: Reads the values of its mask.
        bounds: Intervals of them.
        zeroed: Rows of -inf are zeros, and have no gradient.

    Raises:
        Refused: There may be such rows, and their result in the source cannot be expressed.
    """
    if meaning.nan is not None:
        raise Refused(meaning.nan.code, meaning.nan.message)
    if not spec.mask or sees_a_key(meaning, bounds):
        return "none"
    if spec.unshifted:
        raise Refused("unshifted-exponentials", "fully masked rows are NaN: no maximum is subtracted before the exponentials")
    if zeroed and meaning.fills <= {-math.inf} and not any(map(bounds.may_mask, meaning.biases)):
        return "zeroed"
    masked = masked_keys(spec.mask, reader, bounds)
    numbers = {number for key in masked.keys for number in (key.low, key.high)}
    biases = {number for bias in meaning.biases if bounds.may_mask(bias) for number in outcomes(bias)}
    numbers |= biases
    double = spec.dtype == ir.DataType.DOUBLE
    first, last = (ROUNDS_DOUBLE, ROUNDS_ALL_DOUBLE) if double else (ROUNDS, ROUNDS_ALL)
    summed = biases | {number for key in masked.keys if key.scored for number in (key.low, key.high)} if double else numbers
    rounding = sorted(number for number in summed if last < number < first)
    if rounding and spec.dtype != ir.DataType.FLOAT16:
        kind = "float64" if double else "float32"
        raise Refused("rounded-mask", f"with {rounding[0]:g} added, fully masked rows depend on the order of {kind} additions")
    if not replaces(spec.mask):
        return "added or zeroed" if zeroed else "added"
    alike = len([number for number in numbers if math.isfinite(number)]) < 2 and not any(key.scored for key in masked.keys)
    if alike and not (zeroed or masked.added_later or masked.floored or masked.scaled):
        return "replaced"
    message = "some scores are replaced and others have a mask added; the gradient of rows that lose all keys is of neither kind"
    raise Refused("mixed-mask", message)


def swallows_from(dtype: ir.DataType | None) -> float:
    """The number from which down nothing is left of an ordinary score that it is added to, in a type."""
    return {ir.DataType.FLOAT16: ABSORBS_HALF, ir.DataType.DOUBLE: ROUNDS_ALL_DOUBLE}.get(dtype or ir.DataType.FLOAT, ROUNDS_ALL)


def smallest_gain(mask: Mask) -> float:
    """The smallest constant factor of a summand: the sum is rounded before the factor, which makes the summand look smaller."""
    return min(
        (abs(gain.number) for step, gain in zip(mask, step_gains(mask), strict=True) if isinstance(step, Added)), default=1.0
    )


def levelled(builder: Builder, bias: IndexedValue, kind: Treatment, gain: float) -> Levelled:
    """The form of a bias, laid out (b or 1, n or 1, s or 1, t), that loses nothing of rows without a key.

    Where scores are replaced, or rows are set to 0, rows of -inf become rows of 0: the source's results are put in afterwards.

    Args:
        builder: Adds the nodes.
        bias: The summand, times the factors of later steps.
        kind: What rows without a key need.
        gain: The `smallest_gain` of its mask.
    """
    single, truth = ir.DataType.FLOAT, ir.DataType.BOOL
    own = builder.facts.dtype(bias.value) or single
    lowest = builder.scalar(-largest(own), own)
    counts = builder.elementwise("GreaterOrEqual", [bias.value, lowest], truth)
    finite = builder.holds_along(counts, [3])
    top = builder.reduce("ReduceMax", builder.elementwise("Where", [counts, bias.value, lowest], own), [3])
    low = builder.elementwise("LessOrEqual", [top, builder.scalar(MASKS, own)], truth)
    zero = builder.scalar(0.0, own)
    low = builder.elementwise("And", [low, finite], truth)
    shifted = builder.elementwise("Sub", [bias.value, builder.elementwise("Where", [low, top, zero], own)], own)
    limit = swallows_from(own) * gain
    swallowed = builder.elementwise("LessOrEqual", [top, builder.scalar(limit, own)], truth)
    fully_masked = builder.elementwise("And", [swallowed, finite], truth)
    highest = builder.elementwise("Equal", [shifted, zero], truth)
    level = builder.elementwise("Where", [highest, zero, builder.scalar(-math.inf, own)], own)
    value = builder.elementwise("Where", [fully_masked, level, shifted], own)
    all_infinite = builder.elementwise("Not", [finite], truth)
    if kind != "added":
        value = builder.elementwise("Where", [all_infinite, zero, value], own)
    return Levelled(IndexedValue(value, bias.axes), fully_masked, all_infinite)
