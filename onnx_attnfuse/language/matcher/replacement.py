"""A match written out: its operands and slots in the graph, brought into rows and columns, and the formula it means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.softmax import is_one_for_all_keys
from onnx_attnfuse.attention.match.steps import (
    Added,
    Floored,
    NaNZeroed,
    Negated,
    Passed,
    Replaced,
    Rounded,
    Scaled,
    ScoreStep,
    Shifted,
    Squashed,
    Taken,
    WeightStep,
    Zeroed,
)
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.language.matcher.expression_emitter import ExpressionEmitter, Given, Step
from onnx_attnfuse.language.matcher.match_state import Bound, FilledSlot, Match, MatchedGuard
from onnx_attnfuse.language.normal_form import normal, variants
from onnx_attnfuse.reasons import Refused


@dataclasses.dataclass(frozen=True)
class Replacement:
    """New nodes beside old ones."""

    new: ir.Value
    softmaxes: tuple[ir.Node, ...]
    frontier: Sequence[ir.Value]
    """The values that the old and the new nodes are both computed from."""
    judged: bool = True
    """Whether there is anything to hold them against."""
    replaced: int = 0
    """The number of nodes that they replace; 0 where it does not matter."""


def write(match: Match, builder: Builder) -> Replacement:
    """Writes the meaning of a match beside the written formula.

    Raises:
        Refused: It cannot be brought into rows and columns.
    """
    return _Writer(match, builder).write()


class _Writer:
    def __init__(self, match: Match, builder: Builder) -> None:
        self.match = match
        self.builder = builder
        self.facts = builder.facts
        state = match.state
        self._ends = {number: leaves(axis) for number, axis in state.axes.items()}
        known = {leaf for axis in self._ends.values() for leaf in axis}
        self._batch: list[Axis] = []
        for axis in match.root.axes:
            self._batch += [(leaf,) for leaf in leaves(axis) if leaf not in known] if axis else [()]
        self._stops: list[ir.Value] = []

    def write(self) -> Replacement:
        variant, state = self.match.variant, self.match.state
        meaning = variant.pattern.meaning
        assert meaning is not None
        formula = next(
            found for choices, found in variants(meaning, variant.choices) if choices.items() >= variant.choices.items()
        )
        operands = {variant.names[number]: self._operand(bound) for number, bound in state.operands.items()}
        slots: dict[tuple[str, ...], Step] = {}
        for places, filled in state.slots.items():
            slots[tuple(sorted(variant.names[number] for number in places))] = self._slot(filled)
        guard = self._guard(state.guards) if state.guards else None
        name = state.softmaxes[0].name if state.softmaxes else None
        emitter = ExpressionEmitter(
            self.builder, Given(operands, slots, self._softmax_dtype(), guard), name or f"{variant.pattern.name}/Softmax"
        )
        found = IndexedValue(emitter.emit(normal(formula)), self._axes(0, 1))
        result = arrange(self.builder, found, self.match.root.axes)
        dtype, nodes = self.facts.dtype(self.match.root.value), set(state.nodes)
        result = result if dtype is None else self.builder.cast(result, dtype)
        return Replacement(result, tuple(emitter.softmaxes), tuple(dict.fromkeys(self._stops)), replaced=len(nodes))

    def _softmax_dtype(self) -> ir.DataType | None:
        types = {self.facts.dtype(node.outputs[0]) for node in self.match.state.softmaxes}
        return types.pop() if len(types) == 1 else None

    def _axes(self, row: int, column: int) -> Axes:
        """Batch and heads, each an axis of its own, those of length 1 too, then rows and columns, where these are known."""
        ends: list[Axis] = [self._ends[number] for number in (row, column) if number in self._ends]
        return (*self._batch, *ends)

    def _operand(self, bound: Bound) -> ir.Value | float:
        if bound.indexed is None or (bound.number is not None and not any(bound.indexed.axes)):
            assert bound.number is not None
            return bound.number
        return self._brought(bound.indexed, bound.row, bound.column)

    def _brought(self, indexed: IndexedValue, row: int, column: int) -> ir.Value:
        """A value with rows and columns last; along axes that it lacks it has length 1."""
        present = {leaf for axis in indexed.axes for leaf in leaves(axis)}
        target = tuple(axis if present & set(leaves(axis)) else () for axis in self._axes(row, column))
        if self.facts.number(indexed.value) is None:
            self._stops.append(indexed.value)
        return arrange(self.builder, indexed, target)

    def _slot(self, filled: FilledSlot) -> Step:
        """The content of a slot as a step to be applied to other scores."""
        if filled.steps:
            return _in_turn([self._step(taken, filled) for taken in filled.steps])
        values = [(self._brought(indexed, filled.row, filled.column), sign) for indexed, sign in filled.values]

        def scale(emitter: ExpressionEmitter, value: ir.Value) -> ir.Value:
            for operand, sign in values:
                value = emitter.elementwise("Mul" if sign > 0 else "Div", [value, operand])
            return value if math.isclose(filled.number, 1.0) else emitter.elementwise("Mul", [value, filled.number])

        return scale

    def _step(self, taken: Taken[ScoreStep], filled: FilledSlot) -> Step:
        step = taken.step
        wide = self.facts.dtype(step.scores)
        done = self._done(step, taken, filled)

        def again(emitter: ExpressionEmitter, value: ir.Value) -> ir.Value:
            return done(emitter, value if wide is None else self.builder.cast(value, wide))

        return again

    def _done(self, step: ScoreStep, taken: Taken[ScoreStep], filled: FilledSlot) -> Step:
        match step:
            case Scaled():
                operand, op = self._beside(step.operand, taken, filled), "Div" if step.divide else "Mul"
                return lambda emitter, value: emitter.elementwise(op, [value, operand])
            case Negated():
                return lambda emitter, value: emitter.elementwise("Neg", [value])
            case Added():
                return self._adding(step, self._beside(step.operand, taken, filled))
            case Replaced():
                return _selecting(self._beside(step.condition, taken, filled), step.keep_where, step.fill)
            case Floored():
                return lambda emitter, value: emitter.elementwise("Max", [value, step.low])
            case Shifted():
                if not is_one_for_all_keys(step, taken.axes, self._ends[filled.column], self.facts):
                    message = f"the maximum '{step.largest.name}' is subtracted, which differs by column"
                    raise Refused("shift-by-key", message, taken.node.name)
                return _shifted
            case Passed() | Squashed() | Rounded():
                message = f"{taken.node.op_type} is nothing that a slot takes"
                raise Refused("unreadable-score-step", message, taken.node.name)

    @staticmethod
    def _adding(step: Added, operand: ir.Value | float) -> Step:
        def adding(emitter: ExpressionEmitter, value: ir.Value) -> ir.Value:
            return emitter.elementwise("Sub" if step.negative else "Add", [value, operand])

        return adding

    def _beside(self, value: ir.Value, taken: Taken[ScoreStep] | Taken[WeightStep], filled: FilledSlot) -> ir.Value | float:
        number = self.facts.number(value)
        if number is not None and self.facts.dtype(value) != ir.DataType.BOOL:
            return number
        return self._brought(taken.beside(value, self.facts), filled.row, filled.column)

    def _guard(self, guards: Sequence[MatchedGuard]) -> Step:
        """The steps that guard the weights, in the order of the graph."""
        steps: list[Step] = []
        for guard in reversed(guards):
            step = guard.taken.step
            if isinstance(step, NaNZeroed):
                steps.append(
                    lambda emitter, value: emitter.elementwise("Where", [emitter.elementwise("IsNaN", [value]), 0.0, value])
                )
            elif isinstance(step, Zeroed):
                where = FilledSlot(row=guard.row, column=guard.column)
                steps.append(_selecting(self._beside(step.condition, guard.taken, where), step.keep_where, 0.0))
        return _in_turn(steps)


def _shifted(emitter: ExpressionEmitter, value: ir.Value) -> ir.Value:
    largest = emitter.builder.reduce("ReduceMax", value, [len(emitter.dims(value)) - 1])
    return emitter.elementwise("Sub", [value, largest])


def _in_turn(steps: Sequence[Step]) -> Step:
    def done(emitter: ExpressionEmitter, value: ir.Value) -> ir.Value:
        for step in steps:
            value = step(emitter, value)
        return value

    return done


def _selecting(condition: ir.Value | float, keep_where: bool, fill: float) -> Step:
    assert isinstance(condition, ir.Value)

    def selecting(emitter: ExpressionEmitter, value: ir.Value) -> ir.Value:
        return emitter.elementwise("Where", [condition, value, fill] if keep_where else [condition, fill, value])

    return selecting
