"""The operands of one operator of a graph as goals for those of a formula, with their axes.

Which of these are rows and columns follows from the products: in `a @ b` the columns of `a` are summed with the rows of `b`. A
value is followed upwards through the steps, factors, views and guards that compute it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, new_axes, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, lacks_axis, upward
from onnx_attnfuse.attention.match.contractions import PRODUCTS, Contraction, operand_axes, read_contraction
from onnx_attnfuse.attention.match.steps import (
    Added,
    Floored,
    NaNZeroed,
    Negated,
    Passed,
    Readers,
    Replaced,
    Scaled,
    ScoreStep,
    Shifted,
    Taken,
    WeightStep,
    Zeroed,
)
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of, softmax_axis
from onnx_attnfuse.language.matcher.match_state import FilledSlot, Goal, State
from onnx_attnfuse.language.normal_form import COMMUTATIVE, REDUCTIONS, Op

_TOLERANCE = 1e-5
"""How far a number in a graph may be from the one in a formula: exporters round to float32."""
_COARSE: Mapping[ir.DataType | None, float] = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}
"""The same in half precision, where two numbers may be rounded."""
_REDUCING = frozenset(["ReduceMax", "ReduceMean", "ReduceSum"]) | REDUCTIONS
_MAX_VIEW_CHAIN = 24
_OF_KIND: Mapping[str | None, tuple[type, ...]] = {"scale": (Scaled, Negated), "mask": (Added, Replaced, Floored, Shifted)}


class OperandGoals:
    """Reads the operators of one graph."""

    def __init__(self, facts: Facts, opset: int) -> None:
        self._facts = facts
        self._opset = opset

    def names(self, node: ir.Node) -> set[str]:
        """The operators of the pattern language that a node may be."""
        found = {node.op_type} if is_standard(node) else set[str]()
        if node.op_type == "Pow" and self._is_square(node):
            found.add("Mul")
        elif node.op_type == "Mul" and self._inverse(node) is not None:
            found.add("Div")
        elif node.op_type in PRODUCTS and read_contraction(node, self._facts) is not None:
            found |= {"MatMul", "MixHeads"}
        return found

    def _is_square(self, node: ir.Node) -> bool:
        """Whether a node is the second power of its first input, which to a formula is a product."""
        exponent = node.inputs[1] if is_standard(node, "Pow") else None
        return exponent is not None and self._facts.number(exponent) == 2

    def _inverse(self, node: ir.Node) -> tuple[ir.Value, ir.Node] | None:
        """The dividend and the node of the inverse, where a product is one with `1 / x`, which to a formula is a quotient."""
        for place in (0, 1) if is_standard(node, "Mul") else ():
            dividend, inverse = node.inputs[place], node.inputs[1 - place]
            made = None if inverse is None else inverse.producer()
            one = made.inputs[0] if is_standard(made, "Div") else None
            if (
                dividend is not None
                and made is not None
                and (is_standard(made, "Reciprocal") or (one is not None and self._facts.number(one) == 1))
            ):
                return dividend, made
        return None

    def goals(self, token: Op, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        """The ways in which a node is the operator of a formula, each as goals for its operands."""
        if token.op == "MatMul":
            yield from self._product(node, goal, state)
        elif token.op == "MixHeads":
            yield from self._mixed(node, goal, state)
        elif any(not _attribute_fits(attribute(node, name), value) for name, value in token.attributes):
            return
        elif token.op in {"Softmax", "LogSoftmax"}:
            yield from self._softmax(node, goal, state)
        elif token.op in _REDUCING:
            yield from self._reduced(node, goal, state)
        elif token.op == "Concat":
            yield from self._joined(node, goal, state)
        elif token.op == "Div" and (inverse := self._inverse(node)) is not None:
            dividend, made = inverse
            yield from self._elementwise(token, (dividend, made.inputs[-1]), goal, state.through(made))
        elif token.op == "Mul" and self._is_square(node):
            yield from self._elementwise(token, (node.inputs[0], node.inputs[0]), goal, state)
        elif len([value for value in node.inputs if value is not None]) == len(token.args):
            yield from self._elementwise(token, node.inputs, goal, state)

    def _elementwise(
        self, token: Op, inputs: Sequence[ir.Value | None], goal: Goal, state: State
    ) -> Iterator[tuple[tuple[Goal, ...], State]]:
        goals: list[Goal] = []
        for value in inputs:
            indexed = aligned(value, goal.indexed.axes, self._facts)
            if indexed is None:
                return
            outer = tuple(dict.fromkeys((*goal.outer, *factors_of(goal.indexed.axes))))
            goals.append(dataclasses.replace(goal, indexed=indexed, outer=outer))
        yield tuple(goals), state
        if token.op in COMMUTATIVE and len(goals) == 2 and goals[0] != goals[1]:
            yield (goals[1], goals[0]), state

    def _product(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        contraction = read_contraction(node, self._facts)
        if contraction is None or contraction.factor != 1.0:
            return
        known: dict[str, Axis] = {label: leaves(axis) for label, axis in zip(contraction.out, goal.indexed.axes, strict=True)}
        summed: list[Factor] = []
        for label in sorted(contraction.summed):
            lengths = [
                (self._facts.dims(value) or ())[labels.index(label)]
                for value, labels in zip(contraction.operands, contraction.labels, strict=True)
            ]
            size = next((length for length in lengths if length != 1), 1)
            known[label] = () if size == 1 else (Factor(size),)
            summed += known[label]
        indexed = [operand_axes(contraction, index, known, self._facts) for index in (0, 1)]
        if indexed[0] is None or indexed[1] is None:
            return
        for first, second in ((0, 1), (1, 0)):
            after = state.along(goal.row, _end(contraction, first, known, state.axes.get(goal.row)))
            after = after and after.along(goal.column, _end(contraction, second, known, state.axes.get(goal.column)))
            after = after and dataclasses.replace(after, fresh=state.fresh + 1).along(state.fresh, tuple(summed))
            if after is None:
                continue
            left, right = (IndexedValue(contraction.operands[index], indexed[index] or ()) for index in (first, second))
            left_goal = Goal(left, goal.row, state.fresh, factors_of(left.axes))
            yield (left_goal, Goal(right, state.fresh, goal.column, factors_of(right.axes))), after

    def _mixed(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        """A product that sums over heads: rows and columns are both in the same operand."""
        contraction = read_contraction(node, self._facts)
        column = state.axes.get(goal.column)
        if contraction is None or not column:
            return
        known: dict[str, Axis] = {label: leaves(axis) for label, axis in zip(contraction.out, goal.indexed.axes, strict=True)}
        for one, other in ((0, 1), (1, 0)):
            labels = contraction.labels[one]
            own = {leaf for label in labels if label in known for leaf in known[label]}
            foreign = {leaf for label in contraction.labels[other] if label in known for leaf in known[label]}
            if not set(column) <= own or foreign & own:
                continue
            dims = self._facts.dims(contraction.operands[one]) or ()
            axes = tuple(known[label] if label in known else (Factor(dim),) for label, dim in zip(labels, dims, strict=True))
            mixed = IndexedValue(contraction.operands[one], axes)
            weights = IndexedValue(contraction.operands[other], new_axes(self._facts.dims(contraction.operands[other]) or ()))
            after = dataclasses.replace(state, fresh=state.fresh + 2)
            mixed_goal = Goal(mixed, goal.row, goal.column, factors_of(axes))
            yield (mixed_goal, Goal(weights, state.fresh, state.fresh + 1, factors_of(weights.axes))), after

    def _softmax(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        scores, axis = node.inputs[0], softmax_axis(node, self._facts, self._opset)
        after = None if axis is None else state.along(goal.column, goal.indexed.axes[axis])
        if after is not None and scores is not None:
            after = dataclasses.replace(after, softmaxes=(*after.softmaxes, node))
            yield (dataclasses.replace(goal, indexed=IndexedValue(scores, goal.indexed.axes)),), after

    def _reduced(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        value = node.inputs[0]
        rank = self._facts.rank(value)
        axes = None if rank is None else axes_of(node, 1, rank, self._facts)
        if value is None or rank is None or axes is None or len(axes) != 1:
            return
        kept, place = goal.indexed.axes, axes[0]
        for axis in self._reducible(value, place, goal, state):
            inner = replaced(kept, place, axis) if attribute(node, "keepdims", 1) else (*kept[:place], axis, *kept[place:])
            column, after = goal.column, state.along(goal.column, axis)
            if after is None:
                column, after = state.fresh, dataclasses.replace(state, fresh=state.fresh + 1).along(state.fresh, axis)
            if after is not None:
                yield (Goal(IndexedValue(value, inner), goal.row, column, factors_of(inner)),), after

    def _reducible(self, value: ir.Value, place: int, goal: Goal, state: State) -> Iterator[Axis]:
        """The axes that the columns of a value may be: those known, those that the reduction lacks, any met before."""
        own, known = set(factors_of(goal.indexed.axes)), state.axes.get(goal.column)
        if known:
            yield known
        size = (self._facts.dims(value) or ())[place]
        lacking = tuple(factor for factor in goal.outer if factor not in own)
        for axis in dict.fromkeys((lacking, *state.axes.values())):
            if axis and axis != known and length(axis) == size and own.isdisjoint(axis):
                yield axis

    def _joined(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        if len(node.inputs) != 2:
            return
        axis: int = attribute(node, "axis", 0) % len(goal.indexed.axes)
        after = state.along(goal.column, goal.indexed.axes[axis])
        goals: list[Goal] = []
        for value in node.inputs:
            dims = self._facts.dims(value)
            if value is None or dims is None or after is None:
                return
            own: Axis = () if dims[axis] == 1 else (Factor(dims[axis]),)
            column, after = after.fresh, dataclasses.replace(after, fresh=after.fresh + 1).along(after.fresh, own)
            indexed = IndexedValue(value, replaced(goal.indexed.axes, axis, own))
            goals.append(Goal(indexed, goal.row, column, factors_of(indexed.axes)))
        if after is not None:
            yield tuple(goals), after


def is_close(number: float, wanted: float, dtype: ir.DataType | None = None) -> bool:
    """Whether a number of a graph is one of a formula, as an element type holds it."""
    return math.isclose(number, wanted, rel_tol=_COARSE.get(dtype, _TOLERANCE), abs_tol=1e-12)


def factors_of(axes: Axes) -> Axis:
    """All factors of some axes, one axis after the other."""
    return tuple(leaf for axis in axes for leaf in leaves(axis))


def _end(contraction: Contraction, one: int, known: Mapping[str, Axis], wanted: Axis | None) -> Axis:
    """The rows or columns that one operand gives the product: those wanted, if it has them to itself, else its innermost."""
    labels = [label for label in contraction.out if label in contraction.labels[one] and label not in contraction.labels[1 - one]]
    fitting = (label for label in labels if wanted is not None and set(known[label]) == set(leaves(wanted)))
    label = next(fitting, labels[-1] if labels else None)
    return () if label is None else known[label]


def _attribute_fits(actual: object, wanted: object) -> bool:
    if isinstance(wanted, float) and isinstance(actual, (int, float)):
        return is_close(actual, wanted)
    return actual == wanted


class Traversal:
    """Goes up in one graph."""

    def __init__(self, facts: Facts, readers: Readers) -> None:
        self._facts = facts
        self._readers = readers

    def stripped(self, indexed: IndexedValue) -> IndexedValue:
        """A value without views and casts."""
        *_, (indexed, _, _) = self.steps(indexed, set())
        return indexed

    def steps(
        self, indexed: IndexedValue, kinds: set[str | None]
    ) -> Iterator[tuple[IndexedValue, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]]:
        """Values before runs of steps of some kinds, with these steps in graph order: no step, one, two, ...; each value once."""
        pending: list[tuple[IndexedValue, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]] = [(indexed, (), ())]
        seen: set[ir.Value] = set()
        while pending:
            indexed, steps, nodes = pending.pop()
            node = indexed.value.producer()
            if indexed.value in seen:
                continue
            seen.add(indexed.value)
            yield indexed, steps, nodes
            if node is None or len(nodes) > _MAX_VIEW_CHAIN:
                continue
            view = upward(indexed, self._facts, selecting=True)
            if view is not None:
                pending.append((view, steps, (*nodes, node)))
                continue
            for step, inner in reversed(self._read(node, indexed)):
                also = step.also if isinstance(step, (Passed, Shifted)) else ()
                if isinstance(step, Passed):
                    pending.append((inner, steps, (*nodes, node, *also)))
                elif any(isinstance(step, _OF_KIND[kind]) for kind in kinds):
                    taken: Taken[ScoreStep] = Taken(step, node, indexed.axes)
                    pending.append((inner, (taken, *steps), (*nodes, node, *also)))

    def _read(self, node: ir.Node, indexed: IndexedValue) -> list[tuple[ScoreStep, IndexedValue]]:
        """The steps that a node may be on scores, each with the scores before it, which lack no axis."""
        reader = self._readers.score(node)
        steps = () if reader is None else reader(node, self._facts)
        found = ((step, aligned(step.scores, indexed.axes, self._facts)) for step in steps)
        return [(step, inner) for step, inner in found if inner is not None and not lacks_axis(inner, indexed.axes)]

    def factors(self, indexed: IndexedValue, most: int | None) -> Iterator[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]]:
        """Values before multiplications and divisions, with what they multiply by.

        Args:
            indexed: The value after them.
            most: How many values to multiply by; None: before maximal runs alone, each value once.
        """
        pending: list[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]] = [(indexed, FilledSlot(), ())]
        seen: set[tuple[ir.Value, FilledSlot | None]] = set()
        while pending:
            indexed, filled, nodes = pending.pop()
            key = indexed.value, None if most is None else filled
            if key in seen or (most is not None and len(filled.values) > most):
                continue
            seen.add(key)
            further = self._before_factor(indexed, filled, nodes) if len(nodes) <= _MAX_VIEW_CHAIN else []
            if most is not None or not further:
                yield indexed, filled, nodes
            pending += reversed(further)

    def _before_factor(
        self, indexed: IndexedValue, filled: FilledSlot, nodes: tuple[ir.Node, ...]
    ) -> list[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]]:
        """The values before one node that scales, negates or passes them on; none before any other node."""
        node = indexed.value.producer()
        if node is None:
            return []
        view = upward(indexed, self._facts, selecting=True)
        if view is not None:
            return [(view, filled, (*nodes, node))]
        found: list[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]] = []
        for step, inner in self._read(node, indexed):
            if isinstance(step, Passed):
                return [(inner, filled, (*nodes, node, *step.also))]
            if isinstance(step, Negated):
                found.append((inner, dataclasses.replace(filled, number=-filled.number), (*nodes, node)))
            elif isinstance(step, Scaled):
                found += [(inner, times, (*nodes, node, *more)) for times, more in self._times(filled, step, indexed)]
        return found

    def _times(self, filled: FilledSlot, step: Scaled, indexed: IndexedValue) -> Iterator[tuple[FilledSlot, tuple[ir.Node, ...]]]:
        """The factors so far and one more, which may be a multiple of another value itself."""
        number, sign = self._facts.number(step.operand), -1 if step.divide else 1
        if number:
            yield dataclasses.replace(filled, number=filled.number * number**sign), ()
            return
        operand = aligned(step.operand, indexed.axes, self._facts) or IndexedValue(step.operand, ())
        yield dataclasses.replace(filled, values=(*filled.values, (operand, sign))), ()
        node = step.operand.producer()
        for inner, before in () if node is None else self._read(node, operand):
            number = self._facts.number(inner.operand) if isinstance(inner, Scaled) else None
            if node is not None and isinstance(inner, Scaled) and number:
                times = filled.number * number ** (-sign if inner.divide else sign)
                yield FilledSlot(number=times, values=(*filled.values, (before, sign))), (node,)

    def opened(
        self, indexed: IndexedValue, *, guarded: bool
    ) -> Iterator[tuple[IndexedValue, tuple[Taken[WeightStep], ...], tuple[ir.Node, ...]]]:
        """A value as it is, and what it is a view or a cast of, or was before a guard of rows without a key."""
        guards: tuple[Taken[WeightStep], ...] = ()
        before: tuple[ir.Node, ...] = ()
        while True:
            nodes: tuple[ir.Node, ...] = ()
            for view, _, passed in self.steps(indexed, set()):
                yield view, guards, (*before, *passed)
                indexed, nodes = view, passed
            guard = self._guarded(indexed) if guarded else None
            if guard is None:
                return
            step, indexed, also = guard
            guards, before = (*guards, step), (*before, *nodes, step.node, *also)

    def _guarded(self, indexed: IndexedValue) -> tuple[Taken[WeightStep], IndexedValue, tuple[ir.Node, ...]] | None:
        """The weights before a guard, if one gives the value."""
        node = indexed.value.producer()
        reader = None if node is None else self._readers.weight(node)
        if node is None or reader is None:
            return None
        for weights in (aligned(value, indexed.axes, self._facts) for value in node.inputs):
            step = None if weights is None else reader(node, weights.value, self._facts)
            if weights is not None and isinstance(step, (NaNZeroed, Zeroed)) and step.output is indexed.value:
                return Taken(step, node, indexed.axes), weights, step.further
        return None

    def begins_steps(self, node: ir.Node) -> bool:
        """Whether a node is a step that changes scores."""
        reader = self._readers.score(node)
        return reader is not None and any(not isinstance(step, Passed) for step in reader(node, self._facts))
