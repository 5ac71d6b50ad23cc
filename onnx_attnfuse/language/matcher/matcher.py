"""Finding patterns in a graph: every formula of the net at once, from the outermost operator inwards.

A formula knows rows and columns, a graph has tensors with any order of axes. So every operand is held together with the factors
that its axes run over. Which of them are rows and which are columns follows from the products: in `a @ b` the columns of `a` are
summed with the rows of `b`. Views, casts between float types, and guards of rows without a key are passed on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves, new_axes, refined, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.attention.match.contraction import Contraction, operand_axes, read_contraction
from onnx_attnfuse.attention.match.softmax import find_softmax
from onnx_attnfuse.attention.match.step_readers import Readers
from onnx_attnfuse.attention.match.steps import Scaled
from onnx_attnfuse.graph.constants import attribute, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.language.matcher.discrimination_net import (
    AnOp,
    ANumber,
    AVar,
    Branch,
    Factors,
    Net,
    Slot,
    Steps,
    Token,
    Variant,
)
from onnx_attnfuse.language.matcher.match_state import Bound, Filled, Goal, Guard, Match, State
from onnx_attnfuse.language.matcher.near_miss import Trace
from onnx_attnfuse.language.matcher.traverse import Traversal
from onnx_attnfuse.language.normal_form import COMMUTATIVE
from onnx_attnfuse.language.spellings import REDUCTIONS

_CONSTANT_TOLERANCE = 1e-5
"""How far a number in a graph may be from the one in a formula: exporters round to float32."""
_MOVING = frozenset(["also", "scores"])
"""What of a step says where it stands and not what it does."""
_REDUCING = frozenset(["ReduceMax", "ReduceMean", "ReduceSum"]) | REDUCTIONS


class Matcher:
    """Looks for patterns in one graph."""

    def __init__(self, net: Net, facts: Facts, opset: int, readers: Readers, trace: Trace | None = None) -> None:
        self._net = net
        self._facts = facts
        self._opset = opset
        self._ascent = Traversal(facts, readers)
        self._trace = trace

    def at(self, node: ir.Node) -> Match | None:
        """The pattern that fits at a node, of several the one to be preferred."""
        if not self._may_begin(node):
            return None
        dims = self._facts.dims(node.outputs[0])
        if dims is None:
            return None
        root = IndexedValue(node.outputs[0], new_axes(dims))
        goal = Goal(root, 0, 1, root.axes)
        found = [Match(variant, root, state) for variant, state in self._fit(self._net.root, (goal,), State())]
        return max(found, key=lambda match: (match.variant.pattern.priority, match.variant.size), default=None)

    def _may_begin(self, node: ir.Node) -> bool:
        """Whether a formula may begin with this very operator; what is merely passed on the way begins none."""
        if len(node.outputs) != 1:
            return False
        begins = not self._net.begins.isdisjoint(self._names(node))
        return begins or (self._net.begins_with_steps and self._ascent.begins_steps(node))

    def _names(self, node: ir.Node) -> set[str]:
        """The operators of the pattern language that a node may be."""
        found = {node.op_type} if is_standard(node) else set[str]()
        if self._is_square(node):
            found.add("Mul")
        if read_contraction(node, self._facts) is not None:
            found |= {"MatMul", "MixHeads"}
        return found

    def _is_square(self, node: ir.Node) -> bool:
        """Whether a node is the second power of its first input, which to a formula is a product."""
        exponent = node.inputs[1] if is_standard(node, "Pow") else None
        return exponent is not None and self._facts.number(exponent) == 2

    def _fit(self, branch: Branch, goals: tuple[Goal, ...], state: State) -> Iterator[tuple[Variant, State]]:
        if not goals:
            yield from ((variant, state) for variant in branch.ends)
            return
        goal, rest = goals[0], goals[1:]
        found = False
        for further, inner, after in self._ways(branch, goal, state):
            for result in self._fit(further, (*inner, *rest), after):
                found = True
                yield result
        if not found and self._trace is not None:
            self._trace.miss(state.depth, state.softmaxes, self._ascent.stripped(goal.indexed).value, branch)

    def _ways(self, branch: Branch, goal: Goal, state: State) -> Iterator[tuple[Branch, tuple[Goal, ...], State]]:
        """The tokens of a branch that a value fits, each with what is behind it and the goals that it sets."""
        for token, further in branch.others.items():
            for inner, after in self._other(token, goal, state):
                yield further, inner, after
        if branch.turned is not None:
            yield branch.turned, (dataclasses.replace(goal, row=goal.column, column=goal.row),), state
        if branch.ops:
            yield from self._operators(branch, goal, state)

    def _other(self, token: Token, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        match token:
            case AVar(index):
                yield from (((), after) for after in self._bind(index, goal, state))
            case ANumber(value):
                number = self._facts.number(goal.indexed.value)
                if number is not None and math.isclose(number, value, rel_tol=_CONSTANT_TOLERANCE, abs_tol=1e-12):
                    yield (), state
            case Steps(slots):
                for indexed, steps, nodes in self._ascent.steps(goal.indexed, {kind for kind, _ in slots}):
                    after = self._fill(slots, Filled(steps=steps, row=goal.row, column=goal.column), state)
                    if after is not None:
                        yield (dataclasses.replace(goal, indexed=indexed, outer=indexed.axes),), after.through(*nodes)
            case Factors():
                for indexed, filled, nodes in self._ascent.factors(goal.indexed):
                    after = self._solve(token, filled, goal, state)
                    if after is not None:
                        yield (dataclasses.replace(goal, indexed=indexed, outer=indexed.axes),), after.through(*nodes)
            case _:
                pass

    def _bind(self, index: int, goal: Goal, state: State) -> Iterator[State]:
        indexed, known = goal.indexed, state.operands.get(index)
        if known is not None:
            if self._same(known, indexed):
                yield state
            return
        bound = Bound(indexed, goal.row, goal.column, self._facts.number(indexed.value))
        yield dataclasses.replace(state, operands={**state.operands, index: bound})

    def _same(self, known: Bound, indexed: IndexedValue) -> bool:
        if known.number is not None:
            number = self._facts.number(indexed.value)
            return number is not None and math.isclose(number, known.number, rel_tol=_CONSTANT_TOLERANCE)
        if known.indexed is None:
            return False
        one, other = self._ascent.stripped(known.indexed), self._ascent.stripped(indexed)
        return one.value is other.value and refined(one.axes) == refined(other.axes)

    def _fill(self, slots: tuple[Slot, ...], filled: Filled, state: State) -> State | None:
        known = state.slots.get(slots)
        if known is not None:
            return state if self._key(known) == self._key(filled) else None
        return dataclasses.replace(state, slots={**state.slots, slots: filled})

    def _key(self, filled: Filled) -> Hashable:
        """A key that is equal for two occurrences of a slot with equal content, whether numbers are factors or quotients."""
        factor, keys = filled.number, list[Hashable]()
        for step in (taken.step for taken in filled.steps):
            number = self._facts.number(step.operand) if isinstance(step, Scaled) else None
            if isinstance(step, Scaled) and number:
                factor *= 1 / number if step.divide else number
                continue
            fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
            keys += [
                f"{factor:.5g}",
                type(step),
                *(self._same_value(item) for name, item in fields.items() if name not in _MOVING),
            ]
            factor = 1.0
        return tuple(keys), f"{factor:.5g}", tuple((self._same_value(indexed.value), sign) for indexed, sign in filled.values)

    def _same_value(self, item: object) -> Hashable:
        """A value by what it holds, if it is a small constant."""
        array = constant_array(item) if isinstance(item, ir.Value) else None
        return item if array is None else (str(array.dtype), array.shape, array.tobytes())

    def _solve(self, token: Factors, filled: Filled, goal: Goal, state: State) -> State | None:
        """Binds the operands of a product to numbers and values of the graph; the slot takes the rest. None if they differ."""
        number, values = filled.number / token.coefficient, list(filled.values)
        open_factors: list[tuple[int, int]] = []
        for index, sign in token.factors:
            known = state.operands.get(index)
            if known is None:
                open_factors.append((index, sign))
            elif known.number is not None:
                number /= known.number**sign
            else:
                place = next(
                    (at for at, (indexed, other) in enumerate(values) if other == sign and self._same(known, indexed)), None
                )
                if place is None:
                    return None
                del values[place]
        operands = dict(state.operands)
        for index, sign in open_factors:
            if values:
                place = next((at for at, (_, other) in enumerate(values) if other == sign), None)
                if place is None:
                    return None
                operands[index] = Bound(values.pop(place)[0], goal.row, goal.column)
            else:
                operands[index] = Bound(None, goal.row, goal.column, number**sign)
                number = 1.0
        state = dataclasses.replace(state, operands=operands)
        if token.slot is not None:
            return self._fill((token.slot,), Filled(number=number, values=tuple(values), row=goal.row, column=goal.column), state)
        return None if values or not math.isclose(number, 1.0, rel_tol=_CONSTANT_TOLERANCE) else state

    def _operators(self, branch: Branch, goal: Goal, state: State) -> Iterator[tuple[Branch, tuple[Goal, ...], State]]:
        """The operators of a branch that a value is computed by, behind views, casts and guards."""
        for indexed, guards, nodes in self._ascent.opened(goal.indexed, guarded="Softmax" in branch.ops):
            node = indexed.value.producer()
            if node is None:
                continue
            opened = dataclasses.replace(goal, indexed=indexed, outer=goal.outer if indexed is goal.indexed else indexed.axes)
            for name in self._names(node):
                for token, further in branch.ops.get(name, ()):
                    if guards and name != "Softmax":
                        continue
                    for inner, found in self._operands(token, node, opened, state):
                        met = tuple(Guard(taken, goal.row, goal.column) for taken in guards)
                        after = dataclasses.replace(found, guards=(*found.guards, *met), depth=found.depth + 1)
                        yield further, inner, after.through(*nodes, node)

    def _operands(self, token: AnOp, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
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
        elif token.op == "Mul" and self._is_square(node):
            yield from self._elementwise(token, (node.inputs[0], node.inputs[0]), goal, state)
        elif len([value for value in node.inputs if value is not None]) == token.count:
            yield from self._elementwise(token, node.inputs, goal, state)

    def _elementwise(
        self, token: AnOp, inputs: Sequence[ir.Value | None], goal: Goal, state: State
    ) -> Iterator[tuple[tuple[Goal, ...], State]]:
        goals: list[Goal] = []
        for value in inputs:
            axes = None if value is None else aligned(value, goal.indexed.axes, self._facts)
            if value is None or axes is None:
                return
            outer = goal.outer[len(goal.outer) - len(axes) :]
            goals.append(dataclasses.replace(goal, indexed=IndexedValue(value, axes), outer=outer))
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
            yield (Goal(left, goal.row, state.fresh, left.axes), Goal(right, state.fresh, goal.column, right.axes)), after

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
            yield (Goal(mixed, goal.row, goal.column, axes), Goal(weights, state.fresh, state.fresh + 1, weights.axes)), after

    def _softmax(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        if node.op_type == "LogSoftmax":
            rank = self._facts.rank(node.outputs[0])
            scores, axis = node.inputs[0], attribute(node, "axis", -1) % (rank or 1)
        else:
            softmax = find_softmax(node, self._facts, self._opset)
            if softmax is None:
                return
            scores, axis = softmax.scores, softmax.axis
        after = state.along(goal.column, goal.indexed.axes[axis])
        if after is not None and scores is not None:
            after = dataclasses.replace(after, softmaxes=(*after.softmaxes, node))
            yield (dataclasses.replace(goal, indexed=IndexedValue(scores, goal.indexed.axes), outer=goal.indexed.axes),), after

    def _reduced(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        value = node.inputs[0]
        rank = None if value is None else self._facts.rank(value)
        axes = None if rank is None else axes_of(node, 1, rank, self._facts)
        if value is None or rank is None or axes is None or len(axes) != 1:
            return
        if attribute(node, "keepdims", 1):
            inner = replaced(goal.indexed.axes, axes[0], state.axes.get(goal.column) or goal.outer[axes[0]])
        else:
            inner = (*goal.indexed.axes[: axes[0]], state.axes.get(goal.column, ()), *goal.indexed.axes[axes[0] :])
        after = state.along(goal.column, inner[axes[0]]) if inner[axes[0]] else None
        if after is not None:
            yield (dataclasses.replace(goal, indexed=IndexedValue(value, inner), outer=inner),), after

    def _joined(self, node: ir.Node, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        if len(node.inputs) != 2:
            return
        axis: int = attribute(node, "axis", 0) % len(goal.indexed.axes)
        after = state.along(goal.column, goal.indexed.axes[axis])
        goals: list[Goal] = []
        for value in node.inputs:
            dims = None if value is None else self._facts.dims(value)
            if value is None or dims is None or after is None:
                return
            own: Axis = () if dims[axis] == 1 else (Factor(dims[axis]),)
            column, after = after.fresh, dataclasses.replace(after, fresh=after.fresh + 1).along(after.fresh, own)
            indexed = IndexedValue(value, replaced(goal.indexed.axes, axis, own))
            goals.append(Goal(indexed, goal.row, column, indexed.axes))
        if after is not None:
            yield tuple(goals), after


def _end(contraction: Contraction, one: int, known: Mapping[str, Axis], wanted: Axis | None) -> Axis:
    """The rows or columns that one operand gives the product: those wanted, if it has them to itself, else its innermost."""
    labels = [label for label in contraction.out if label in contraction.labels[one] and label not in contraction.labels[1 - one]]
    fitting = (label for label in labels if wanted is not None and set(known[label]) == set(leaves(wanted)))
    label = next(fitting, labels[-1] if labels else None)
    return () if label is None else known[label]


def _attribute_fits(actual: object, wanted: object) -> bool:
    if isinstance(wanted, float) and isinstance(actual, (int, float)):
        return math.isclose(actual, wanted, rel_tol=_CONSTANT_TOLERANCE)
    return actual == wanted
