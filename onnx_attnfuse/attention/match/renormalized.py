"""Masks of weights that are divided by the rest of their sum, read as masks of the scores.

    softmax(s) · m / Σ softmax(s) · m        is        softmax(where(m, s, -inf))

The two differ where the unmasked weights are so small that floats lose them (`kept-weights`), and where a row has only keys that
something in front of the softmax masks, which is refused.
"""

from __future__ import annotations

import dataclasses
import math

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, varies_along
from onnx_attnfuse.attention.masks.classify import element, keep_condition, split_mask
from onnx_attnfuse.attention.masks.fully_masked import implied
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.mask_terms import is_binary
from onnx_attnfuse.attention.match import steps
from onnx_attnfuse.attention.match.scores import ScorePath
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.attention.match.steps import NaNZeroed, Renormalized, ScoreStep, Taken, Weighted, WeightStep, Zeroed
from onnx_attnfuse.attention.match.weights import WeightPath
from onnx_attnfuse.attention.spec import Mask, Renormalization, Replaced
from onnx_attnfuse.certify.terms import TRUE, conjoin
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.thresholds import BESIDE_SOFTENING, LEAST_EXPONENT, LEAST_SUM, SOFTENS


@dataclasses.dataclass(frozen=True)
class InFront:
    """The ways to the softmax and from it once masks after it that are divided away are moved before it."""

    scores: ScorePath
    weights: WeightPath
    moved: int = 0
    """How many masks, the last steps of the scores."""
    taken: Taken[WeightStep] | None = None
    """The division; None where there is none."""


def in_front(softmax: Softmax, scores: ScorePath, weights: WeightPath, key_axis: Axis, reader: Reader) -> InFront:
    """Moves masks of weights that are divided by their sum in front of the softmax.

    Raises:
        Refused: The sum is not that of all keys of a row, or has other operators than masks before it.
    """
    place = next((at for at, taken in enumerate(weights.steps) if isinstance(taken.step, Renormalized)), None)
    if place is None:
        return InFront(scores, weights)
    taken = weights.steps[place]
    assert isinstance(taken.step, Renormalized)
    if softmax.sink is not None:
        raise Refused("weights-scaled-by-key", "the weights are divided by their sum, which removes the sink", taken.node.name)
    _check_sum(taken.step, taken, key_axis, reader.facts)
    masks = [_moved(item, softmax, key_axis, reader) for item in weights.steps[:place]]
    zeroed: list[Taken[WeightStep]] = [Taken(NaNZeroed(taken.step.output), taken.node, taken.axes)] if taken.step.zeroes else []
    scores = dataclasses.replace(scores, steps=(*scores.steps, *masks))
    return InFront(scores, dataclasses.replace(weights, steps=(*zeroed, *weights.steps[place + 1 :])), len(masks), taken)


def renormalization(mask: Mask, moved: InFront, reader: Reader) -> Renormalization | None:
    """How the weights are divided by the rest of their sum; None where all of it is left.

    Args:
        mask: All masks of the scores, the moved ones last.
        moved: Which these are.
        reader: Reads their values.

    Raises:
        Refused: Something in front of the softmax may mask keys that these keep, or the rest may be lost.
    """
    if moved.taken is None:
        return None
    first, last = mask[: len(mask) - moved.moved], mask[len(mask) - moved.moved :]
    step, node, facts = moved.taken.step, moved.taken.node, reader.facts
    assert isinstance(step, Renormalized)
    if step.softened > SOFTENS:
        message = f"{step.softened:g} is added to the sum that divides the weights, which changes small sums"
        raise Refused("vanishing-weights", message, node.name)
    bounds, parts = Bounds(facts), split_mask(first, reader)
    kept = conjoin(*(keep_condition(item.condition, item.keep_where, reader) for item in last if isinstance(item, Replaced)))
    lows = [low for bias in parts.biases for low in outcomes(bias)]
    least = max(LEAST_SUM, BESIDE_SOFTENING * step.softened)
    weakest = LEAST_EXPONENT + math.log(least / LEAST_SUM)
    hides = any(map(bounds.may_mask, parts.biases)) or min(lows, default=0.0) < min(weakest, 0.0)
    if hides or not (parts.allowed is TRUE or implied(kept, parts.allowed)):
        message = "the weights are masked after the softmax and the scores by another mask before it; a row may lose all keys"
        raise Refused("masked-twice", message, node.name)
    if first and bounds.lowest(first) == -math.inf:
        message = "fully masked rows are NaN after the softmax, before their weights are masked and divided by their sum"
        raise Refused("masked-twice", message, node.name)
    if kept is parts.allowed:
        return None
    if not facts.assumed.kept_weights:
        raise Refused(
            "vanishing-weights", "the weights are divided by the sum that a mask leaves, which rounding may swamp", node.name
        )
    return Renormalization(_total(step, moved.taken.axes, facts), least)


def _total(step: Renormalized, axes: Axes, facts: Facts) -> IndexedValue:
    """The sum of the weights laid out as `axes`, before anything keeps it from being 0."""
    reduced = axes_of(step.reduction, 1, len(axes), facts) or []
    kept: list[Axis] = [() if place in reduced else axis for place, axis in enumerate(axes)]
    if not attribute(step.reduction, "keepdims", 1):
        kept = [axis for place, axis in enumerate(axes) if place not in reduced]
    return IndexedValue(step.reduction.outputs[0], tuple(kept))


def _check_sum(step: Renormalized, taken: Taken[WeightStep], key_axis: Axis, facts: Facts) -> None:
    """Refuses any sum but that of all keys of one row."""
    reduced = axes_of(step.reduction, 1, len(taken.axes), facts)
    columns = set(leaves(key_axis))
    if reduced is None or {leaf for place in reduced for leaf in leaves(taken.axes[place])} != columns:
        message = f"the weights are divided by '{step.reduction.outputs[0].name}', which is not the sum of a row's keys"
        raise Refused("weights-scaled-by-key", message, taken.node.name)


def _moved(taken: Taken[WeightStep], softmax: Softmax, key_axis: Axis, reader: Reader) -> Taken[ScoreStep]:
    """A mask of the weights as one of the scores."""
    step = taken.step
    if isinstance(step, Zeroed):
        return Taken(steps.Replaced(softmax.scores, step.condition, step.keep_where, -math.inf), taken.node, taken.axes)
    if not isinstance(step, Weighted) or step.divide:
        message = f"{taken.node.op_type} is between the softmax and the sum that divides its weights"
        raise Refused("weights-scaled-by-key", message, taken.node.name)
    axes = aligned(step.operand, taken.axes, reader.facts)
    indexed = None if axes is None else IndexedValue(step.operand, axes)
    if indexed is None or not varies_along(indexed, key_axis) or not is_binary(element(indexed.refined(), reader)):
        message = f"the weights are multiplied by '{step.operand.name}', which may be neither 0 nor 1, and divided by their sum"
        raise Refused("weights-scaled-by-key", message, taken.node.name)
    return Taken(steps.Replaced(softmax.scores, step.operand, True, -math.inf), taken.node, taken.axes)
