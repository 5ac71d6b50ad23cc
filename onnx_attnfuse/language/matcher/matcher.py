"""Finding patterns in a graph: every formula of the net at once, from the outermost operator inwards.

A formula knows rows and columns, a graph has tensors with any order of axes. So every operand is held together with the factors
that its axes run over. Which of them are rows and which are columns follows from the products: in `a @ b` the columns of `a` are
summed with the rows of `b`. Views, casts between float types, and guards of rows without a key are passed on the way.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import new_axes, refined
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.contractions import PRODUCTS
from onnx_attnfuse.attention.match.steps import Readers, Scaled
from onnx_attnfuse.graph.constants import constant_array
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language.matcher.discrimination_net import Net, NetBranch, Variant
from onnx_attnfuse.language.matcher.match_state import Bound, FilledSlot, Goal, Match, MatchedGuard, State, Trace
from onnx_attnfuse.language.matcher.operands import OperandGoals, Traversal, factors_of, is_close
from onnx_attnfuse.language.normal_form import FactorProduct, Form, Literal, Slotted, Var, kind_of

_MOVING = frozenset(["also", "scores"])
"""The attributes of a step that give its place and not its effect."""
_MORE_TYPES = {"Mul": ("Pow",), "Div": ("Mul",), "MatMul": PRODUCTS, "MixHeads": PRODUCTS}
"""For operators of the pattern language the types of nodes that may be one besides its own."""


class Matcher:
    """Looks for patterns in one graph."""

    def __init__(self, net: Net, facts: Facts, opset: int, readers: Readers, trace: Trace | None = None) -> None:
        self._net = net
        self._facts = facts
        self._operands = OperandGoals(facts, opset)
        self._types = net.begins.union(*(_MORE_TYPES.get(name, ()) for name in net.begins))
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
        goal = Goal(root, 0, 1, factors_of(root.axes))
        found = [Match(variant, root, state) for variant, state in self._fit(self._net.root, (goal,), State())]
        return max(found, key=lambda match: (match.variant.pattern.priority, match.variant.size), default=None)

    def _may_begin(self, node: ir.Node) -> bool:
        """Whether a formula may begin with this very operator; operators that are merely passed on the way begin none."""
        if len(node.outputs) != 1:
            return False
        begins = node.op_type in self._types and not self._net.begins.isdisjoint(self._operands.names(node))
        return begins or (self._net.begins_with_steps and self._ascent.begins_steps(node))

    def _fit(self, branch: NetBranch, goals: tuple[Goal, ...], state: State) -> Iterator[tuple[Variant, State]]:
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

    def _ways(self, branch: NetBranch, goal: Goal, state: State) -> Iterator[tuple[NetBranch, tuple[Goal, ...], State]]:
        """The tokens of a branch that a value fits, each with its next branch and the goals that it sets."""
        for token, further in branch.others.items():
            for inner, after in self._other(token, goal, state):
                yield further, inner, after
        if branch.turned is not None:
            yield branch.turned, (dataclasses.replace(goal, row=goal.column, column=goal.row),), state
        if branch.ops:
            yield from self._operators(branch, goal, state)

    def _other(self, token: Form, goal: Goal, state: State) -> Iterator[tuple[tuple[Goal, ...], State]]:
        match token:
            case Var(name):
                yield from (((), after) for after in self._bind(name, goal, state))
            case Literal(value):
                number = self._facts.number(goal.indexed.value)
                if number is not None and is_close(number, value, self._facts.dtype(goal.indexed.value)):
                    yield (), state
            case Slotted(slots):
                for indexed, steps, nodes in self._ascent.steps(goal.indexed, set(map(kind_of, slots))):
                    after = self._fill(slots, FilledSlot(steps=steps, row=goal.row, column=goal.column), state)
                    if after is not None:
                        yield (dataclasses.replace(goal, indexed=indexed),), after.through(*nodes)
            case FactorProduct():
                for indexed, filled, nodes in self._ascent.factors(
                    goal.indexed, len(token.factors) if token.slot is None else None
                ):
                    for after in self._solve(token, filled, goal, state):
                        yield (dataclasses.replace(goal, indexed=indexed),), after.through(*nodes)
            case _:
                pass

    def _bind(self, name: str, goal: Goal, state: State) -> Iterator[State]:
        indexed, known = goal.indexed, state.operands.get(name)
        if known is not None:
            if self._same(known, indexed) and state.agree(known.column, goal.column):
                yield state
            return
        bound = Bound(indexed, goal.row, goal.column, self._facts.number(indexed.value))
        yield dataclasses.replace(state, operands={**state.operands, name: bound})

    def _same(self, known: Bound, indexed: IndexedValue) -> bool:
        if known.number is not None:
            number = self._facts.number(indexed.value)
            return number is not None and is_close(number, known.number, self._facts.dtype(indexed.value))
        if known.indexed is None:
            return False
        pairs = (known.indexed, indexed), (self._ascent.stripped(known.indexed), self._ascent.stripped(indexed))
        return any(one.value is other.value and refined(one.axes) == refined(other.axes) for one, other in pairs)

    def _fill(self, slots: tuple[str, ...], filled: FilledSlot, state: State) -> State | None:
        known = state.slots.get(slots)
        if known is not None:
            return state if self._key(known) == self._key(filled) and state.agree(known.column, filled.column) else None
        return dataclasses.replace(state, slots={**state.slots, slots: filled})

    def _key(self, filled: FilledSlot) -> Hashable:
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

    def _solve(self, token: FactorProduct, filled: FilledSlot, goal: Goal, state: State) -> Iterator[State]:
        """Binds the operands of a product to numbers and values of the graph, in each order; the slot takes the rest."""
        number, values = filled.number / token.coefficient, list(filled.values)
        open_factors: list[tuple[str, int]] = []
        for name, sign in token.factors:
            known = state.operands.get(name)
            if known is None:
                open_factors.append((name, sign))
            elif known.number is not None:
                number /= known.number**sign
            else:
                place = next(
                    (at for at, (indexed, other) in enumerate(values) if other == sign and self._same(known, indexed)), None
                )
                if place is None:
                    return
                del values[place]
        for order in itertools.permutations(values) if len(open_factors) > 1 else (values,):
            after = self._solved(token, open_factors, FilledSlot(number=number, values=tuple(order)), goal, state)
            if after is not None:
                yield after

    def _solved(
        self, token: FactorProduct, open_factors: Sequence[tuple[str, int]], filled: FilledSlot, goal: Goal, state: State
    ) -> State | None:
        """The open operands bound to the values in their order, then to the number; None if they do not fit."""
        number, values, operands = filled.number, list(filled.values), dict(state.operands)
        for name, sign in open_factors:
            if values:
                place = next((at for at, (_, other) in enumerate(values) if other == sign), None)
                if place is None:
                    return None
                operands[name] = Bound(values.pop(place)[0], goal.row, goal.column)
            else:
                operands[name] = Bound(None, goal.row, goal.column, number**sign)
                number = 1.0
        state = dataclasses.replace(state, operands=operands)
        if token.slot is not None:
            filled = FilledSlot(number=number, values=tuple(values), row=goal.row, column=goal.column)
            return self._fill((token.slot,), filled, state)
        return None if values or not is_close(number, 1.0, self._facts.dtype(goal.indexed.value)) else state

    def _operators(self, branch: NetBranch, goal: Goal, state: State) -> Iterator[tuple[NetBranch, tuple[Goal, ...], State]]:
        """The operators of a branch that a value is computed by, after views, casts and guards."""
        for indexed, guards, nodes in self._ascent.opened(goal.indexed, guarded="Softmax" in branch.ops):
            node = indexed.value.producer()
            if node is None:
                continue
            opened = dataclasses.replace(goal, indexed=indexed)
            for name in self._operands.names(node):
                for token, further in branch.ops.get(name, {}).items():
                    if guards and name != "Softmax":
                        continue
                    for inner, found in self._operands.goals(token, node, opened, state):
                        met = tuple(MatchedGuard(taken, goal.row, goal.column) for taken in guards)
                        after = dataclasses.replace(found, guards=(*found.guards, *met), depth=found.depth + 1)
                        yield further, inner, after.through(*nodes, node)
