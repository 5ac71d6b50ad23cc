"""A step of a recurrence as LinearAttention: read from its normal form, whatever nodes compute it.

    state · exp(decay) + key ⊗ rate · (value - state · exp(decay) · key)        after one token
    sum of that state times a query, along the keys                             its result

The operands of the state are executed symbolically. The sum falls into a product with the old state, which is the decay, and one
without it, whose factors vary along the keys, along the values, or along neither. `mixers.rewrite` decides whether that is all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.certify.arrays import reshaped
from onnx_attnfuse.certify.execution import UNKNOWN
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import ZERO, Term, free, polynomial, walk
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.ops import CONTRIB, REARRANGES, REPEATS, SLICES, is_standard
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import dependents
from onnx_attnfuse.mixers.candidates import Mixer
from onnx_attnfuse.mixers.rewrite import (
    Ends,
    Reading,
    Replacement,
    Turn,
    in_order,
    is_heavy,
    narrowed,
    ungrouped,
    unviewed,
    with_state,
)
from onnx_attnfuse.reasons import Refused

OPERATOR = "LinearAttention"
_BATCH, _HEAD, _KEY, _VALUE = range(4)
_TURNED = (0, 1, 3, 2)
_MOST_OPENED = 32
_OPENED = REARRANGES | REPEATS | SLICES | {"Exp", "Mul", "Gather"}
"""Operators that are executed where what they give is not yet a product of what varies along one axis each."""


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A value that is a factor, and what its axes are."""

    value: ir.Value
    axes: dict[int, int]
    is_flat: bool = False
    """Whether those axes are what its elements are laid out in, in their order, and its own axes are others."""


@dataclasses.dataclass(frozen=True)
class _Read:
    """The result that a state is read for."""

    value: ir.Value
    query: _Factor
    scale: float
    key_axis: int
    """Which of the last two axes of the state the keys are along."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of a recurrence, as inputs and attributes of the operator."""

    inputs: tuple[ir.Value | None, ...]
    """Query, key and value, (b, 1, heads * size), then the decay and the rate where there is one."""
    settings: Mapping[str, Any]
    dims: tuple[Dim, ...]
    """The shape of the operator's state, (b, n, k, v)."""
    is_transposed: bool
    """Whether the mixer's state is (b, n, v, k)."""
    result: ir.Value
    """The value that the token's query reads."""

    def write(
        self, inputs: Sequence[ir.Value | None], past: ir.Value, length: Dim, builder: Builder
    ) -> tuple[ir.Value, ir.Value]:
        """The operator on inputs of some tokens: its result, (b, length, n * v), and the mixer's state after them."""
        (batch, heads, _, size), dtype = self.dims, builder.facts.dtype(past)
        assert isinstance(heads, int)
        before = builder.transpose(past, _TURNED) if self.is_transposed else past
        given = [*inputs[:3], before, *inputs[3:]]
        dims = (batch, length, heads * size)
        out = builder.node(OPERATOR, given, self.settings, domain=CONTRIB, dims=dims, dtype=dtype, outputs=2)
        now = with_state(builder, out, self.dims)
        return out, builder.transpose(now, _TURNED) if self.is_transposed else now


def fused_step(mixer: Mixer, builder: Builder) -> Replacement:
    """The operator for one step of a recurrence.

    Raises:
        Refused: It is none that the operator has, as far as it can be read.
    """
    state, present = mixer.state, mixer.node.outputs[0]
    if state is None:
        raise _left("it has no state")
    step = read_step(state, present, builder)
    out, now = step.write(step.inputs, state, 1, builder)
    result, below = builder.reshape(out, dims_of(builder, step.result)), set(dependents([state]))
    return Replacement(OPERATOR, ((present, now), (step.result, result)), (lambda item: item not in below and is_heavy(item),))


def read_step(state: ir.Value, present: ir.Value, builder: Builder, turn: Turn | None = None) -> Step:
    """The operator's inputs for one token.

    Args:
        state: The state before it.
        present: The state after it.
        builder: Builds the inputs.
        turn: The turn of the loop that computes the token.

    Raises:
        Refused: The update is none that the operator has, as far as it can be read.
    """
    dims = builder.facts.dims(present)
    if dims is None or len(dims) != 4 or not all(isinstance(dim, int) for dim in dims[1:]):
        raise _left("the state is no matrix of known size for each head")
    below = set(dependents([state]))
    with aside():
        read = next(_reads(present, below, builder, turn), None)
        if read is None:
            raise _left("nothing reads the state by a query of one token")
        update = _update(state, present, below, read.key_axis, builder, turn)
    return _step(present, read, update, builder)


def _left(why: str) -> Refused:
    return Refused("mixer-step", f"a step of a recurrence is left: {why}")


def _reads(present: ir.Value, below: set[ir.Value], builder: Builder, turn: Turn | None) -> Iterator[_Read]:
    """The values that are a sum, along the keys, of a state times a query."""
    for value in itertools.islice(dependents([present]), 1, _MOST_OPENED):
        found = _as_read(value, present, below, builder, turn)
        if found is not None:
            yield found


def _as_read(value: ir.Value, present: ir.Value, below: set[ir.Value], builder: Builder, turn: Turn | None) -> _Read | None:
    opened = set[ir.Value]()
    for _ in range(_MOST_OPENED):
        reading = Reading(_ends(present, below, opened, builder), builder.facts, turn)
        try:
            place, term = reading.element(value)
        except UNKNOWN:
            return None
        ((sums, factor), *more) = polynomial(term).items() or [((), 0)]
        if more or len(sums) != 1 or sums[0].op != "sum":
            return None
        bound, body = sums[0].args
        ((atoms, inner), *more) = polynomial(body).items()
        states = [atom for atom in atoms if reading.value(atom) is present]
        rest = [atom for atom in atoms if atom not in states]
        if more or len(states) != 1 or bound not in states[0].args[2:] or len(rest) != 1:
            return None
        axis = states[0].args.index(bound)
        kinds = _kinds(states[0].args, axis)
        read = [kinds.get(item) for item in place if item is not ZERO]
        if read != [kind for kind in (_BATCH, _HEAD, _VALUE) if kind in kinds.values()]:
            return None
        query = _factor(rest[0], kinds, reading, builder)
        if query is not None:
            return _Read(value, query, float(factor) * float(inner), axis)
        if not _open(rest[0], reading, opened):
            return None
    return None


def _ends(state: ir.Value, below: Container[ir.Value], opened: Container[ir.Value], builder: Builder) -> Ends:
    """Whether a value is a state, or a number that does not depend on it and is not opened; sizes are executed."""
    facts = builder.facts
    return lambda item: item is state or (item not in below and item not in opened and facts.dtype(item) in FLOATS)


def near(computed: Container[ir.Value], builder: Builder) -> Ends:
    """Whether a number is none of what is computed, and its node none that the reader opens."""
    facts = builder.facts
    return lambda item: item not in computed and facts.dtype(item) in FLOATS and not is_standard(item.producer(), *_OPENED)


def _kinds(place: Sequence[Term], key_axis: int) -> dict[Term, int]:
    """The kinds of a state's axes by their indices, without those of axes of length 1."""
    order = (_BATCH, _HEAD, *((_KEY, _VALUE) if key_axis == 2 else (_VALUE, _KEY)))
    return {item: kind for item, kind in zip(place, order, strict=True) if item is not ZERO}


def _factor(atom: Term, kinds: dict[Term, int], reading: Reading, builder: Builder) -> _Factor | None:
    """An element as that of a value, whose axes are those of a state, or of length 1; of all tokens' it is this one's."""
    value, turn = reading.value(atom), reading.turn
    if value is not None and turn is not None and turn.term in atom.args:
        axis = atom.args.index(turn.term)
        value = builder.node("Gather", [value, turn.number], {"axis": axis})
        atom = reading.array(value).at(*atom.args[:axis], *atom.args[axis + 1 :])
    dims = builder.facts.dims(value)
    if value is None or dims is None or len(dims) != len(atom.args):
        return None
    axes = {axis: kinds[item] for axis, item in enumerate(atom.args) if item in kinds}
    if all(dims[axis] == 1 or axis in axes for axis in range(len(dims))) and len(set(axes.values())) == len(axes):
        return _Factor(value, axes)
    indices = [item for item in kinds if item in free(atom)]
    laid = reshaped(reading.array(value), [item.args[0] for item in indices])
    if laid.at(*indices) is not atom:
        return None
    return _Factor(value, {place: kinds[item] for place, item in enumerate(indices)}, is_flat=True)


def _open(atom: Term, reading: Reading, opened: set[ir.Value]) -> bool:
    """Executes the node of an element, if that may help; else False."""
    value = reading.value(atom)
    node = None if value is None else value.producer()
    if value is None or value in opened or not is_standard(node, *_OPENED):
        return False
    opened.add(value)
    return True


def _update(
    state: ir.Value, present: ir.Value, below: set[ir.Value], key_axis: int, builder: Builder, turn: Turn | None
) -> tuple[_Factor | None, list[_Factor], bool]:
    """The logarithm of the decay, the factors of what a token adds, and whether it takes away what the key retrieves.

    Raises:
        Refused: The update has another form.
    """
    opened = set[ir.Value]()
    for _ in range(_MOST_OPENED):
        reading = Reading(_ends(state, below, opened, builder), builder.facts, turn)
        try:
            place, term = reading.element(present)
            parts, own = polynomial(term), reading.array(state).at(*place)
        except UNKNOWN as error:
            raise _left("its update cannot be executed") from error
        kinds = _kinds(place, key_axis)
        kept = [[atom for atom in atoms if atom is not own] for atoms in parts if own in atoms]
        added = [atoms for atoms in parts if not any(reading.value(item) is state for atom in atoms for item in walk(atom))]
        if len(kept) != 1 or len(kept[0]) > 1 or len(added) != 1 or parts[added[0]] != 1:
            raise _left("its update is no sum of a faded state and one product")
        decay, unread = None, [atom for atom in kept[0] if atom.op != "function" or atom.data != "exp"]
        if kept[0] and not unread:
            ((logarithm, factor), *more) = polynomial(kept[0][0].args[0]).items()
            decay = _factor(logarithm[0], kinds, reading, builder) if len(logarithm) == 1 and factor == 1 and not more else None
            unread = [] if decay is not None else [*logarithm]
        factors = [_factor(atom, kinds, reading, builder) for atom in added[0]]
        unread += [
            atom
            for atom, item in zip(added[0], factors, strict=True)
            if item is None or {_KEY, _VALUE} <= set(item.axes.values())
        ]
        if not unread:
            return decay, [item for item in factors if item is not None], len(parts) > 2
        before = len(opened)
        for atom in unread:
            _open(atom, reading, opened)
        if len(opened) == before:
            raise _left("a decay is no exponential, or a factor varies along keys and values")
    raise _left("it is too deep")


def _step(present: ir.Value, read: _Read, update: tuple[_Factor | None, list[_Factor], bool], builder: Builder) -> Step:
    decay, added, is_delta = update
    before = dims_of(builder, present)
    batch, heads = before[:2]
    k, v = before[read.key_axis], before[5 - read.key_axis]
    assert isinstance(heads, int)
    assert isinstance(k, int)
    assert isinstance(v, int)
    lengths = (batch, heads, k, v)
    decay = None if decay is None else _shaped(decay, lengths, builder)
    wanted = _shaped(read.query, lengths, builder)
    shrunk = [_narrow(_shaped(item, lengths, builder), builder) for item in added]
    keys = [item for item in shrunk if _KEY in item.axes.values()]
    rates = [item for item in shrunk if is_delta and not {_KEY, _VALUE} & set(item.axes.values())]
    values = [item for item in shrunk if item not in keys and item not in rates]
    if len(keys) != 1 or len(rates) > 1 or not values or (is_delta and not rates):
        raise _left("keys, values or rates are no factors of their own")
    (query, own), (key, shared) = (_grouped(item, heads, builder) for item in (wanted, keys[0]))
    groups = own if own == shared else heads
    product = builder.chained("Mul", [_laid(item, _VALUE, builder) for item in values])
    inputs: list[ir.Value | None] = [
        _joined(query if groups == own else _laid(wanted, _KEY, builder), (batch, groups, k), builder),
        _joined(key if groups == shared else _laid(keys[0], _KEY, builder), (batch, groups, k), builder),
        _joined(product, (batch, heads, v), builder),
    ]
    rule = f"{'gated_' if decay is not None else ''}delta" if is_delta else "gated" if decay else "linear"
    if decay is not None:
        fade = _narrow(decay, builder)
        if _VALUE in fade.axes.values():
            raise _left("its decay varies along the values")
        laid = _laid(fade, _KEY, builder)
        inputs.append(_joined(laid, (batch, heads, dims_of(builder, laid)[3]), builder))
    if rates:
        inputs += [None] * (decay is None)
        inputs.append(_joined(_laid(rates[0], _VALUE, builder), (batch, heads, 1), builder))
    settings = {"q_num_heads": groups, "kv_num_heads": heads, "update_rule": rule, "scale": read.scale}
    return Step(tuple(inputs), settings, lengths, read.key_axis != 2, read.value)


def _shaped(item: _Factor, lengths: Sequence[Dim], builder: Builder) -> _Factor:
    """A factor whose axes are its value's own."""
    if not item.is_flat:
        return item
    return _Factor(builder.reshape(item.value, [lengths[kind] for kind in item.axes.values()]), item.axes)


def _narrow(item: _Factor, builder: Builder) -> _Factor:
    """A factor without the axes along which it does not vary."""
    value, axes = item.value, dict(item.axes)
    for axis, kind in item.axes.items():
        found = narrowed(value, axis, builder) if kind in {_KEY, _VALUE} else None
        if found is not None:
            value = found
            del axes[axis]
    return _Factor(value, axes)


def _grouped(item: _Factor, heads: int, builder: Builder) -> tuple[ir.Value, int]:
    """Queries or keys, (b, 1, n, k), with one for all heads that share it."""
    value = in_order(item.value, item.axes, (_BATCH, _HEAD, _KEY), builder)
    batch, own, size = dims_of(builder, value)
    found, count = (value, 1) if own == 1 else ungrouped(value, heads, builder.facts)
    return builder.reshape(found, (batch, 1, count, size)), count


def _joined(value: ir.Value, dims: tuple[Dim, int, Dim], builder: Builder) -> ir.Value:
    """A value as (b, 1, n * size), repeated along axes of length 1."""
    batch, heads, size = dims
    found = builder.expand(value, (batch, 1, heads, size))
    return builder.reshape(unviewed(value, builder.facts) if found is value else found, (batch, 1, size * heads))


def _laid(item: _Factor, last: int, builder: Builder) -> ir.Value:
    """A factor as (b, 1, n, k) or (b, 1, n, v), with 1 where it does not vary."""
    value = in_order(item.value, item.axes, (_BATCH, _HEAD, last), builder)
    batch, *rest = dims_of(builder, value)
    return builder.reshape(value, (batch, 1, *rest))
