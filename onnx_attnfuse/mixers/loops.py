"""A recurrence in a Scan or Loop as one LinearAttention of all tokens, for every number of turns.

Any one turn is written out before the loop: a number that nothing computes selects its tokens. That turn is a step as decoders
have it (`mixers.recurrences`), and the inputs of its operator are then computed for all turns at once. Proved are, for any turn
and any state, the step, and that each input for all turns has the turn's input at its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify.meanings.call import axis_of
from onnx_attnfuse.graph.along import again, along
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, subgraphs
from onnx_attnfuse.graph.ops import ASKS_SHAPE, RANDOM, REDUCTIONS, is_standard
from onnx_attnfuse.graph.sizes import Dim, symbols
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.mixers.candidates import Mixer, through
from onnx_attnfuse.mixers.recurrences import OPERATOR, dependents, near, read_step
from onnx_attnfuse.mixers.rewrite import Induction, Replacement, Turn, is_heavy
from onnx_attnfuse.reasons import Refused


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A Scan or Loop as its turns."""

    turn: Turn
    bound: Mapping[ir.Value, ir.Value]
    """Inputs of its body in this turn, but for the state."""
    states: tuple[ir.Value, ir.Value, ir.Value, ir.Value]
    """The state before and after a turn, in the body, and before and after the loop."""
    given: ir.Value
    """The value in the body that a turn gives."""
    joined: ir.Value
    """The values of all turns, after the loop."""
    axis: int
    """The axis of the turns there."""
    is_new_axis: bool = True
    """Whether a turn's own value lacks that axis."""


def fused_loop(mixer: Mixer, builder: Builder) -> Replacement:
    """The operator for all turns of a loop.

    Raises:
        Refused: Its turns are no steps of a recurrence that the operator has, or there are not as many as tokens.
    """
    if not is_standard(mixer.node, "Scan", "Loop"):
        raise _left("an attribute of it is unknown")
    loop = (_scan if mixer.node.op_type == "Scan" else _loop)(mixer.node, builder)
    facts, turn, past = builder.facts, loop.turn, loop.states[2]
    state = _symbol("state", facts.dims(past), facts.dtype(past), builder)
    values = _written_out(loop, state, builder)
    present, given = values[loop.states[1]], values[loop.given]
    if facts.dims(present) != facts.dims(past):
        raise _left("its state changes its shape")
    step = read_step(state, present, builder, turn)
    whole = _Whole(turn, state, builder)
    inputs = [None if item is None else whole.sequence(item) for item in step.inputs]
    out, last = step.write(inputs, past, turn.length, builder)
    one, now = step.write(step.inputs, state, 1, builder)
    token = whole.know(step.result, out)
    every = whole.all(given)
    computed = set(dependents([state, turn.number]))
    of_inputs = [(item, whole.token(both)) for item, both in zip(step.inputs, inputs, strict=True) if item and both]
    return Replacement(
        OPERATOR,
        ((loop.states[3], last), (loop.joined, _joined(every, loop, builder))),
        (near(computed, builder), lambda item: item not in computed and is_heavy(item)),
        loop=Induction(
            turn,
            past,
            frozenset([turn.number, state, out, *whole.reduced.values()]),
            (*of_inputs, (present, now), (step.result, builder.reshape(one, dims_of(builder, step.result)))),
            tuple((item, whole.of_turn(both)) for item, both in whole.reduced.items()),
            (step.result, token),
            (given, whole.of_turn(every)),
        ),
    )


def _left(why: str) -> Refused:
    return Refused("mixer-loop", f"a recurrence in a loop is left: {why}")


def _symbol(hint: str, dims: Sequence[Dim] | None, dtype: ir.DataType | None, builder: Builder) -> ir.Value:
    """A value that nothing computes; what is written with it goes once a proof is made."""
    value = ir.Value(name=builder.name(f"attnfuse/{hint}"))
    builder.facts.record(value, dims, dtype)
    return value


def _turn(length: Dim, builder: Builder) -> Turn:
    return Turn(_symbol("turn", (), ir.DataType.INT64, builder), length)


def _scan(node: ir.Node, builder: Builder) -> _Loop:
    """A Scan of one state."""
    (body,), facts = subgraphs(node), builder.facts
    count: int = attribute(node, "num_scan_inputs", 0)
    backwards = [*attribute(node, "scan_input_directions", []), *attribute(node, "scan_output_directions", [])]
    if len(node.inputs) != count + 1 or any(backwards) or any(value is None for value in node.inputs):
        raise _left("it has several states, or goes backwards")
    past, *sequences = (value for value in node.inputs if value is not None)
    shapes = [facts.dims(value) for value in sequences]
    if not shapes or any(dims is None for dims in shapes):
        raise _left("the shapes of its sequences are unknown")
    axes = [
        axis_of(axis, len(dims or ())) for axis, dims in zip(attribute(node, "scan_input_axes", [0] * count), shapes, strict=True)
    ]
    turn = _turn((shapes[0] or ())[axes[0]], builder)
    tokens = [builder.node("Gather", [value, turn.number], {"axis": axis}) for value, axis in zip(sequences, axes, strict=True)]
    place = _only_used(node.outputs, range(1, len(node.outputs)))
    axis: int = attribute(node, "scan_output_axes", [0] * len(node.outputs))[place - 1]
    given = body.outputs[place]
    return _Loop(
        turn,
        dict(zip(body.inputs[1:], tokens, strict=True)),
        (body.inputs[0], body.outputs[0], past, node.outputs[0]),
        given,
        node.outputs[place],
        axis,
    )


def _loop(node: ir.Node, builder: Builder) -> _Loop:
    """A Loop of one state and, by TorchScript, a list of what its turns give; no condition ends it."""
    (body,), facts = subgraphs(node), builder.facts
    trips, begins, *carried = node.inputs
    length = facts.content(trips)
    length = length[0] if isinstance(length, tuple) and len(length) == 1 else length
    if not (begins is None or _holds(begins)) or not (through(body.outputs[0]) is body.inputs[1] or _holds(body.outputs[0])):
        raise _left("a condition may end it")
    if length is None or isinstance(length, (tuple, float, str)):
        raise _left("the number of its turns is unknown")
    turn, count = _turn(length, builder), len(carried)
    lists = [place for place, value in enumerate(carried) if value is not None and is_standard(value.producer(), "SequenceEmpty")]
    held = [place for place in range(count) if place not in lists]
    if len(held) != 1 or carried[held[0]] is None:
        raise _left("it has several states")
    place = _only_used(node.outputs, [*lists, *range(count, len(node.outputs))])
    given, joined, axis, is_new = body.outputs[place + 1], node.outputs[place], 0, True
    if place in lists:
        given, joined, axis, is_new = _listed(given, body.inputs[place + 2], joined)
    at, past = held[0], carried[held[0]]
    assert past is not None
    states = body.inputs[at + 2], body.outputs[at + 1], past, node.outputs[at]
    return _Loop(turn, {body.inputs[0]: turn.number}, states, given, joined, axis, is_new)


def _holds(value: ir.Value | None) -> bool:
    """Whether a condition is always true."""
    array = None if value is None else constant_array(through(value))
    return array is not None and bool(array.all())


def _only_used(outputs: Sequence[ir.Value], places: Sequence[int]) -> int:
    """The one of some outputs that anything reads."""
    used = [place for place in places if outputs[place].uses() or outputs[place].is_graph_output()]
    if len(used) != 1:
        raise _left("its turns give several values, or none that is read")
    return used[0]


def _listed(after: ir.Value, before: ir.Value, every: ir.Value) -> tuple[ir.Value, ir.Value, int, bool]:
    """The value that a turn appends to a list, all of them joined, their axis there, and whether it is a new one."""
    append, users = after.producer(), [user for user, _ in every.uses()]
    if not is_standard(append, "SequenceInsert") or len(append.inputs) != 2 or append.inputs[0] is not before:
        raise _left("a turn does more to a list than append to it")
    if len(users) != 1 or not is_standard(users[0], "ConcatFromSequence") or append.inputs[1] is None:
        raise _left("the list of what its turns give is not joined at once")
    return append.inputs[1], users[0].outputs[0], attribute(users[0], "axis"), bool(attribute(users[0], "new_axis", 0))


def _written_out(loop: _Loop, state: ir.Value, builder: Builder) -> dict[ir.Value, ir.Value]:
    """The values of a body that a turn computes, with nodes of their own outside of it; the shape of its state is the first's."""
    (before, after, past, _), body = loop.states, loop.states[0].graph
    values, wanted = {**loop.bound, before: state}, (after, loop.given)
    assert isinstance(body, ir.Graph)
    for value in body.initializers.values():
        array = constant_array(value)
        if array is not None:
            values[value] = builder.constant(array)
    needed = {value.producer() for value in sources(wanted, lambda value, _: value not in values)}
    for node in (node for node in body if node in needed):
        if subgraphs(node) or not is_standard(node) or node.op_type in RANDOM:
            raise _left(f"{node.op_type} is in it")
        known = {**values, before: past} if is_standard(node, *ASKS_SHAPE) else values
        inputs = [None if value is None else known.get(value, value) for value in node.inputs]
        first = builder.node(node.op_type, inputs, attributes(node), domain=node.domain, outputs=len(node.outputs))
        copy = first.producer()
        assert copy is not None
        builder.facts.learn(copy)
        values.update(zip(node.outputs, copy.outputs, strict=True))
    if any(value not in values for value in wanted):
        raise _left("a state does not change, or a turn gives what it was given")
    return values


def _joined(every: ir.Value, loop: _Loop, builder: Builder) -> ir.Value:
    """The values of all turns, the turns first, as the loop joins them."""
    length, *dims = dims_of(builder, every)
    axis = axis_of(loop.axis, len(dims) + loop.is_new_axis)
    if not loop.is_new_axis:
        if dims[axis] != 1:
            raise _left("a turn gives several tokens")
        every = builder.reshape(every, (length, *dims[:axis], *dims[axis + 1 :]))
    order = [*range(1, len(dims) + loop.is_new_axis)]
    order.insert(axis, 0)
    return builder.transpose(every, order)


class _Whole:
    """Values of one turn, computed for all turns at once."""

    def __init__(self, turn: Turn, state: ir.Value, builder: Builder) -> None:
        self._turn, self._builder = turn, builder
        self._moving = set(dependents([turn.number, state]))
        self._known: dict[ir.Value, ir.Value] = {}
        self.reduced: dict[ir.Value, ir.Value] = {}
        """Reductions of a turn, each with those of all."""

    def know(self, result: ir.Value, out: ir.Value) -> ir.Value:
        """Takes what the operator gives for all turns, (b, t, w), for the result of one; returns that of this turn."""
        build, (batch, *dims) = self._builder, dims_of(self._builder, result)
        if not build.facts.same(batch, dims_of(build, out)[0]):
            raise _left("its results do not begin with the batch")
        apart = build.reshape(out, (batch, self._turn.length, *dims))
        self._known[result] = build.transpose(apart, (1, 0, *range(2, len(dims) + 2)))
        return build.reshape(self.of_turn(out, 1), (batch, *dims))

    def sequence(self, value: ir.Value) -> ir.Value:
        """A value of one token, (b, 1, w), for all tokens, (b, t, w)."""
        build, (batch, _, width) = self._builder, dims_of(self._builder, value)
        length = self._turn.length
        if value not in self._moving:
            return build.expand(value, (batch, length, width))
        return build.transpose(build.reshape(self.all(value), (length, batch, width)), (1, 0, 2))

    def of_turn(self, every: ir.Value, axis: int = 0) -> ir.Value:
        """The element of the turn, without the axis of the turns."""
        return self._builder.node("Gather", [every, self._turn.number], {"axis": axis})

    def token(self, every: ir.Value) -> ir.Value:
        """The token of the turn, (b, 1, w), of (b, t, w)."""
        batch, _, width = dims_of(self._builder, every)
        return self._builder.reshape(self.of_turn(every, 1), (batch, 1, width))

    def all(self, value: ir.Value) -> ir.Value:
        """A value that differs by turn, with an axis of all turns before its own."""
        if value not in self._moving:
            raise _left("a turn gives what does not depend on its token")
        if value not in self._known:
            self._known[value] = self._computed(value)
        return self._known[value]

    def _computed(self, value: ir.Value) -> ir.Value:
        node, build, length = value.producer(), self._builder, self._turn.length
        dims = dims_of(build, value)
        source = None if node is None else node.inputs[0]
        if node is None or source is None:
            raise _left("it computes with the number of a turn, or with the state")
        if is_standard(node, "Gather") and node.inputs[1] is self._turn.number and source not in self._moving:
            return self._axis_first(source, attribute(node, "axis", 0))
        if is_standard(node, "Expand") and source in self._moving:
            return build.expand(self._aligned(source, len(dims)), (length, *dims))
        axes = along(node, build.facts)
        moving = {place: item for place, item in enumerate(node.inputs) if item is not None and item in self._moving}
        is_picked = node.op_type == "Gather" and 1 in moving
        if isinstance(axes, str) or is_heavy(value) or is_picked or not moving.keys() <= axes.keys():
            raise _left(f"{node.op_type} is in it, which is not computed for all turns at once")
        every = {place: self._aligned(item, len(axes[place])) for place, item in moving.items()}
        results = [("",) * len(dims_of(build, output)) for output in node.outputs]
        found = again(node, every, build, ("",) * len(dims_of(build, source)), results)[node.outputs.index(value)]
        if is_standard(node, *REDUCTIONS):
            self.reduced[value] = found
        return found

    def _axis_first(self, source: ir.Value, axis: int) -> ir.Value:
        """The sequence that each turn takes one element of, which must have as many."""
        dims = dims_of(self._builder, source)
        axis = axis_of(axis, len(dims))
        facts, length = self._builder.facts, self._turn.length
        if not facts.same(dims[axis], length) or any(any(facts.assumed_equal(name)) for name in symbols(length)):
            raise _left("its turns are not shown to be as many as the tokens")
        return self._builder.transpose(source, [axis, *(other for other in range(len(dims)) if other != axis)])

    def _aligned(self, value: ir.Value, rank: int) -> ir.Value:
        """A value for all turns, with axes of length 1 after that of the turns, up to a rank."""
        dims = dims_of(self._builder, value)
        return self._builder.reshape(self.all(value), (self._turn.length, *[1] * (rank - len(dims)), *dims))
