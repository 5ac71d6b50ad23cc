"""The sum of the steps on the way from Q·Kᵀ to Softmax: one scale, at most one soft cap, one mask."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor, leaves
from onnx_attnfuse.attention.masks.classify import element
from onnx_attnfuse.attention.masks.fully_masked import masked_keys
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.masks.mask_terms import zero_or
from onnx_attnfuse.attention.match import steps
from onnx_attnfuse.attention.match.paths import ScorePath
from onnx_attnfuse.attention.match.steps import ScoreStep, Taken
from onnx_attnfuse.attention.spec import Added, Floored, Mask, MaskStep, Replaced, Scaled, ScaleValue, step_gains
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.thresholds import ORDINARY, ROUNDS_HALF
from onnx_attnfuse.reasons import Refused

_NEXT_TO_NOTHING = 1e-6
"""Added to all scores, a number up to this changes none that counts, masked or not."""


@dataclasses.dataclass(frozen=True)
class Folded:
    """`scale · scores`, or `softcap · tanh(scale · scores / softcap)`; then the mask."""

    scale: float
    scale_values: tuple[ScaleValue, ...]
    softcap: float | None
    mask: Mask


def fold(path: ScorePath, reader: Reader, *, alone: bool = True) -> Folded:
    """Folds the steps of a path, first step first.

    Args:
        path: The steps.
        reader: Reads their operands.
        alone: A softmax of these scores and nothing else follows, which does not see a number that is added to all of them.

    Raises:
        Refused: They amount to something else; the reason names the step's node.
    """
    folder = _Folder(path.columns(), reader, alone=alone)
    for taken in path.steps:
        folder.take(taken)
    return folder.result()


class _Folder:
    """The steps taken so far."""

    def __init__(self, columns: frozenset[Factor], reader: Reader, *, alone: bool) -> None:
        self._columns, self._alone = columns, alone
        self._reader, self._facts, self._bounds = reader, reader.facts, Bounds(reader.facts)
        self._scale = 1.0
        self._scale_values: list[ScaleValue] = []
        self._squashed = False
        self._cap = 1.0
        self._mask: list[MaskStep] = []
        self._nodes: list[ir.Node] = []
        """For each step of the mask its node."""
        self._zeroed: ir.Node | None = None
        """Where scores are multiplied by zeros and ones, if they are."""
        self._is_moved = False
        """A number that is next to nothing was added to all scores alike."""

    def result(self) -> Folded:
        is_moved = self._alone and all(map(self._moves_all, self._mask))
        mask = () if is_moved else tuple(self._mask)
        if not is_moved:
            self._check_fills(mask)
        if not self._squashed:
            return Folded(self._scale, tuple(self._scale_values), None, mask)
        return Folded(self._scale * self._cap, tuple(self._scale_values), self._cap, mask)

    def _moves_all(self, step: MaskStep) -> bool:
        """Whether a step adds one ordinary number to all scores, which a softmax does not see; beside a mask it may round."""
        number = self._facts.number(step.indexed.value) if isinstance(step, Added) else None
        return number is not None and abs(number) < -ROUNDS_HALF

    def take(self, taken: Taken[ScoreStep]) -> None:
        match taken.step:
            case steps.Scaled() as step:
                self._scaled(step, taken)
            case steps.Negated():
                self._multiplied(-1.0, taken)
            case steps.Added() as step:
                self._added(step, taken)
            case steps.Replaced() as step:
                self._masks(Replaced(taken.beside(step.condition, self._facts), step.keep_where, step.fill), taken)
            case steps.Floored() as step:
                self._floored(step, taken)
            case steps.Squashed():
                self._squash(taken)
            case _:
                pass

    def _masks(self, step: MaskStep, taken: Taken[ScoreStep]) -> None:
        self._mask.append(step)
        self._nodes.append(taken.node)

    def _scaled(self, step: steps.Scaled, taken: Taken[ScoreStep]) -> None:
        number = self._facts.number(step.operand)
        if number is None:
            self._scaled_by_value(step, taken)
            return
        if not math.isfinite(number) or (step.divide and number == 0):
            raise Refused("bad-scale", f"the scores are scaled by {number}", taken.node.name)
        self._multiplied(1 / number if step.divide else number, taken)

    def _scaled_by_value(self, step: steps.Scaled, taken: Taken[ScoreStep]) -> None:
        name = step.operand.name
        indexed = taken.beside(step.operand, self._facts)
        if any(not self._columns.isdisjoint(leaves(axis)) for axis in indexed.axes):
            factor = None if step.divide else zero_or(element(indexed.refined(), self._reader))
            if factor is None:
                raise Refused("scale-by-key", f"the scores are multiplied by '{name}', which differs by key", taken.node.name)
            if self._may_be_infinite(taken):
                message = f"scores that may be -inf are multiplied by '{name}', which is 0 for some keys; these become NaN"
                raise Refused("scale-by-key", message, taken.node.name)
            self._multiplied(factor, taken)
            self._zeroed = taken.node
            self._masks(Replaced(indexed, keep_where=True, fill=0.0), taken)
            return
        if self._squashed:
            raise Refused("computed-softcap", f"the soft cap '{name}' is computed at run time", taken.node.name)
        self._scale_values.append(ScaleValue(indexed, step.divide))
        if self._mask:
            self._masks(Scaled(indexed, step.divide), taken)

    def _may_be_infinite(self, taken: Taken[ScoreStep]) -> bool:
        """Whether masked scores are -inf, or may lie below the range of their type."""
        dtype = self._facts.dtype(taken.node.outputs[0])
        lowest = -math.inf if dtype is None else -largest(dtype)
        return bool(self._mask) and self._bounds.lowest(tuple(self._mask)) - ORDINARY < lowest

    def _multiplied(self, number: float, taken: Taken[ScoreStep]) -> None:
        if number < 0 and replaces(self._mask):
            raise Refused("negated-mask", "the scores change sign after they are masked", taken.node.name)
        if not self._squashed:
            self._scale *= number
            if self._mask and number != 1.0:
                self._masks(Scaled(number), taken)
            return
        if self._mask:
            raise Refused("scaled-softcap", "capped scores are scaled after they are masked", taken.node.name)
        self._cap *= number

    def _added(self, step: steps.Added, taken: Taken[ScoreStep]) -> None:
        number = self._facts.number(step.operand)
        if number is not None and self._alone and abs(number) <= _NEXT_TO_NOTHING:
            self._is_moved |= number != 0
            return
        self._masks(Added(taken.beside(step.operand, self._facts), step.negative), taken)

    def _floored(self, step: steps.Floored, taken: Taken[ScoreStep]) -> None:
        if step.low == -math.inf:
            return
        if self._mask:
            self._masks(Floored(step.low), taken)
        elif not step.low <= self._bounds.masked_from:
            self._refuse_floor(step.low, taken.node)

    def _squash(self, taken: Taken[ScoreStep]) -> None:
        if self._squashed or self._mask or self._is_moved:
            raise Refused("masked-tanh", "tanh is applied to scores that are already masked or added to", taken.node.name)
        self._squashed = True

    def _refuse_floor(self, low: float, node: ir.Node) -> None:
        raise Refused("high-floor", f"scores are clamped at {low:g}, which ordinary scores may reach", node.name)

    def _check_fills(self, mask: Mask) -> None:
        """Refuses fills that are no mask any more once all later factors and additions are made."""
        limit, bounds = self._bounds.masked_from, self._bounds
        for step, gain, node in zip(mask, step_gains(mask), self._nodes, strict=True):
            if isinstance(step, Floored) and not (step.low * gain.number <= limit and not gain.values):
                self._refuse_floor(step.low * gain.number, node)
            if not isinstance(step, Replaced) or node is self._zeroed:
                continue
            smallest = bounds.gain(gain)[0]
            if gain.values and smallest <= 0:
                message = f"scores are replaced by {step.fill:g}, which is then multiplied by a number computed at run time"
                raise Refused("scaled-fill", message, node.name)
            if not step.fill * gain.number * smallest <= limit:
                message = f"scores are replaced by {step.fill * gain.number:g}, which is an ordinary score, not a mask"
                raise Refused("soft-fill", message, node.name)
        if self._zeroed is not None:
            keys = masked_keys(mask, self._reader, bounds).keys
            if not all(key.high <= limit for key in keys):
                message = "the scores of some keys are multiplied by 0, and nothing shows that these keys are masked, too"
                raise Refused("scale-by-key", message, self._zeroed.name)


def replaces(mask: Iterable[MaskStep]) -> bool:
    """Whether a step of a mask puts a number in the place of the score."""
    return any(isinstance(step, (Replaced, Floored)) for step in mask)
