"""What the steps on the way from Q·Kᵀ to Softmax amount to: one scale, at most one soft cap, one mask."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.axes.factors import Factor, leaves
from onnx_attnfuse.axes.views import Laid, aligned
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language.steps import Added, Floored, Negated, Replaced, Scaled, ScoreStep, Squashed, Taken
from onnx_attnfuse.match.scores import ScorePath
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import FORBIDS, Floor, Mask, ScaleValue, Select, Term, Times, Total


@dataclasses.dataclass(frozen=True)
class Folded:
    """`scale · scores`, or `softcap · tanh(scale · scores / softcap)`; then the mask."""

    scale: float
    scale_values: tuple[ScaleValue, ...]
    softcap: float | None
    mask: Mask | None


def fold(path: ScorePath, facts: Facts) -> Folded:
    """Folds the steps of a path, first step first.

    Raises:
        Refused: They amount to something else; the reason names the step's node.
    """
    folder = _Folder(path.columns(), facts)
    for taken in path.steps:
        folder.take(taken)
    return folder.result()


class _Folder:
    """The steps taken so far."""

    def __init__(self, columns: frozenset[Factor], facts: Facts) -> None:
        self._columns = columns
        self._facts = facts
        self._scale = 1.0
        self._scale_values: list[ScaleValue] = []
        self._squashed = False
        self._cap = 1.0
        self._mask: Mask | None = None

    def result(self) -> Folded:
        if not self._squashed:
            return Folded(self._scale, tuple(self._scale_values), None, self._mask)
        return Folded(self._scale * self._cap, tuple(self._scale_values), self._cap, self._mask)

    def take(self, taken: Taken[ScoreStep]) -> None:
        step = taken.step
        if isinstance(step, Scaled):
            self._scaled(step, taken)
        elif isinstance(step, Negated):
            self._multiplied(-1.0, taken)
        elif isinstance(step, Added):
            self._added(step, taken)
        elif isinstance(step, Replaced):
            self._replaced(step, taken)
        elif isinstance(step, Floored):
            self._floored(step, taken)
        elif isinstance(step, Squashed):
            self._squash(taken)

    def _scaled(self, step: Scaled, taken: Taken[ScoreStep]) -> None:
        number = self._facts.number(step.operand)
        if number is None:
            self._scaled_by_value(step, taken)
            return
        if not math.isfinite(number) or (step.divide and number == 0):
            raise Refused("bad-scale", f"the scores are scaled by {number}", taken.node.name)
        self._multiplied(1 / number if step.divide else number, taken)

    def _scaled_by_value(self, step: Scaled, taken: Taken[ScoreStep]) -> None:
        name = step.operand.name
        laid = self._operand(step.operand, taken)
        if any(not self._columns.isdisjoint(leaves(axis)) for axis in laid.axes):
            raise Refused("scale-by-key", f"the scores are multiplied by '{name}', which differs by key", taken.node.name)
        if self._squashed:
            raise Refused("computed-softcap", f"the soft cap '{name}' is computed at run time", taken.node.name)
        self._scale_values.append(ScaleValue(laid, step.divide))
        if self._mask is not None:
            self._mask = Times(self._mask, laid, step.divide)

    def _multiplied(self, number: float, taken: Taken[ScoreStep]) -> None:
        if number < 0 and replaces(self._mask):
            raise Refused("negated-mask", "scores change their sign after they were masked", taken.node.name)
        if not self._squashed:
            self._scale *= number
            self._mask = None if self._mask is None else Times(self._mask, number)
            return
        if self._mask is not None:
            raise Refused("scaled-softcap", "capped scores are scaled after they were masked", taken.node.name)
        self._cap *= number

    def _added(self, step: Added, taken: Taken[ScoreStep]) -> None:
        if step.mirrored:
            self._multiplied(-1.0, taken)
        term = Term(self._operand(step.operand, taken))
        if self._mask is None:
            self._mask = Times(term, -1.0) if step.negative else term
        else:
            self._mask = Total(self._mask, term, step.negative)

    def _replaced(self, step: Replaced, taken: Taken[ScoreStep]) -> None:
        if step.fill > FORBIDS:
            message = f"scores are replaced by {step.fill:g}, which is an ordinary score and no mask"
            raise Refused("soft-fill", message, taken.node.name)
        self._mask = Select(self._operand(step.condition, taken), step.keep_where, step.fill, self._mask)

    def _floored(self, step: Floored, taken: Taken[ScoreStep]) -> None:
        if step.low > FORBIDS:
            raise Refused("high-floor", f"scores are held above {step.low:g}, which ordinary scores may reach", taken.node.name)
        self._mask = None if self._mask is None else Floor(self._mask, step.low)

    def _squash(self, taken: Taken[ScoreStep]) -> None:
        if self._squashed or self._mask is not None:
            raise Refused("masked-tanh", "tanh is applied to scores that are masked already", taken.node.name)
        self._squashed = True

    def _operand(self, value: ir.Value, taken: Taken[ScoreStep]) -> Laid:
        axes = aligned(value, taken.axes, self._facts)
        if axes is None:
            message = f"the rank of '{value.name}' is unknown, or larger than that of the scores"
            raise Refused("unknown-rank", message, taken.node.name)
        return Laid(value, axes)


def replaces(mask: Mask | None) -> bool:
    """Whether a part of the mask puts a number in the place of the score."""
    if isinstance(mask, (Select, Floor)):
        return True
    if isinstance(mask, Total):
        return replaces(mask.left) or replaces(mask.right)
    return isinstance(mask, Times) and replaces(mask.mask)
