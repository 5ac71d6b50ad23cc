"""Mixers rewritten: values laid out for the operator, its results connected, and a proof of the new nodes.

Certificates' meanings execute the new nodes and the replaced ones from the same values:

    ends = proved([(old, new)], lambda value: value in operands, facts)     # the values that both were executed from, or None

No solver is asked: two results are equal where they come to one normal form, whatever the sizes are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify.arrays import aligned, axes_of, scalar, without_repeats
from onnx_attnfuse.certify.claims import places_of
from onnx_attnfuse.certify.execution import UNKNOWN, Execution, length_of
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.prover import Prover
from onnx_attnfuse.certify.terms import Term, index, size
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, is_constant, needed
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import (
    ASKS_SHAPE,
    CASTS,
    ELEMENTWISE,
    GATHERS,
    REARRANGES,
    REDUCTIONS,
    REPEATS,
    RESHAPES,
    SLICES,
    is_standard,
)
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import origin

Ends = Callable[[ir.Value], bool]
Pairs = Sequence[tuple[ir.Value, ir.Value]]
_LIGHT = ASKS_SHAPE | CASTS | ELEMENTWISE | GATHERS | REARRANGES | REDUCTIONS | REPEATS | SLICES | {"Softplus", "Concat"}


@dataclasses.dataclass(frozen=True)
class Turn:
    """Any turn of a loop, whose number nothing computes."""

    number: ir.Value
    """Its number, a scalar."""
    length: Dim
    """How many turns there are."""

    @property
    def term(self) -> Term:
        """Its number as an index."""
        return index("turn", length_of(self.length))


class Reading(Execution):
    """A graph, executed from some values, each an array with a name of its own; constants of one content are one."""

    def __init__(self, ends: Ends, facts: Facts, turn: Turn | None = None) -> None:
        self._named: dict[object, str] = {}
        self._valued: dict[str, ir.Value] = {}
        super().__init__(facts, self._name, {}, ends, facts.opset, size)
        self.turn = turn
        if turn is not None:
            self._arrays[turn.number] = scalar(turn.term, ir.DataType.INT64)

    def _name(self, value: ir.Value) -> str:
        array = constant_array(value) if is_constant(value) else None
        content = None if array is None else without_repeats(array)
        key = value if content is None else (str(content.dtype), content.shape, content.tobytes())
        name = self._named.setdefault(key, f"v{len(self._named)}")
        self._valued[name] = value
        return name

    def define(self, pairs: Pairs) -> None:
        """Takes the first of each pair to be the second."""
        for value, other in pairs:
            self._arrays[value] = self.array(other)

    def element(self, value: ir.Value) -> tuple[tuple[Term, ...], Term]:
        """Indices of a value, 0 on axes of length 1, and its element there, computed by the nodes above it."""
        array = self.array(value, beyond=True)
        place = aligned(axes_of(array), array.shape)
        return place, array.at(*place)

    def value(self, atom: Term) -> ir.Value | None:
        """The value that an atom is an element of; None if it is something else."""
        return self._valued.get(atom.data) if atom.op == "element" else None


def is_heavy(value: ir.Value) -> bool:
    """Whether execution ends at a value that is neither a view nor computed element by element."""
    return not is_standard(value.producer(), *_LIGHT)


def proved(pairs: Pairs, ends: Ends, facts: Facts, turn: Turn | None = None, defined: Pairs = ()) -> tuple[ir.Value, ...] | None:
    """The values from which both of each pair were executed, if all elements are equal then; None if they may differ.

    Args:
        pairs: Values that are to be equal.
        ends: Whether execution ends at a value.
        facts: Facts about the graph.
        turn: The turn of a loop for which that is asked.
        defined: Values that others are by the definition of an operator.
    """
    with aside():
        reading, prover = Reading(ends, facts, turn), Prover(lambda _: False)
        try:
            reading.define(defined)
            for old, new in pairs:
                one, other = reading.array(old, beyond=True), reading.array(new, beyond=True)
                lengths = [*zip(one.shape, other.shape, strict=True)]
                place = aligned(places_of(one, other), one.shape)
                if not all(prover.equal(*terms, ()) for terms in (*lengths, (one.at(*place), other.at(*place)))):
                    return None
        except UNKNOWN:
            return None
        return tuple(value for value in reading.read.values() if not is_constant(value))


@dataclasses.dataclass(frozen=True)
class Induction:
    """Why a loop and an operator of all its turns are equal: any one turn is a step of the operator."""

    turn: Turn
    past: ir.Value
    """The state before the loop."""
    symbols: frozenset[ir.Value]
    """The number of the turn, the state before it and what the operator gives, which end its execution."""
    step: tuple[tuple[ir.Value, ir.Value], ...]
    """Equal in any turn: the step, and each input for all turns at its number."""
    reduced: tuple[tuple[ir.Value, ir.Value], ...]
    """Reductions in the turn, each with the turn's element of the same reduction of all; they have no formula of terms."""
    token: tuple[ir.Value, ir.Value]
    """The result of the step, and by definition of the operator the token of all of them."""
    result: tuple[ir.Value, ir.Value]
    """Equal then: the value that the turn gives, and that of all turns at its number."""


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One fused operator for a mixer, not yet proved to equal it."""

    operator: str
    pairs: Pairs
    """Results of the mixer, each with its new value."""
    ends: tuple[Ends, ...]
    """Whether a value is one that both are computed from, in the order in which that is tried."""
    folds: tuple[ir.Value, ...] = ()
    """New values made of constants alone."""
    loop: Induction | None = None
    """The equalities that are proved instead of the pairs, where a loop gives them."""

    def proof(self, facts: Facts) -> tuple[ir.Value, ...] | None:
        """The values from which both of each pair are computed, if they are proved equal."""
        return next((found for ends in self.ends if (found := self._read(ends, facts)) is not None), None)

    def _read(self, ends: Ends, facts: Facts) -> tuple[ir.Value, ...] | None:
        if self.loop is None:
            return proved(self.pairs, ends, facts)
        loop = self.loop
        read = proved(loop.step, ends, facts, loop.turn, loop.reduced)
        after = None if read is None else proved([loop.result], ends, facts, loop.turn, (*loop.reduced, loop.token))
        if read is None or after is None:
            return None
        return tuple(dict.fromkeys((loop.past, *(item for item in (*read, *after) if item not in loop.symbols))))


def with_state(builder: Builder, value: ir.Value, dims: tuple[Dim, ...]) -> ir.Value:
    """The second output of a node that was just built, the state that goes out, whose shape is now known."""
    node, dtype = value.producer(), builder.facts.dtype(value)
    assert node is not None
    state = node.outputs[1]
    builder.facts.record(state, dims, dtype)
    state.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in dims])
    return state


def unviewed(value: ir.Value, facts: Facts) -> ir.Value:
    """A value with the same elements in the same order, before all views that keep both."""
    node = value.producer()
    while is_standard(node, "Identity", "Gather", "Transpose", *RESHAPES):
        source = node.inputs[0]
        if source is None or facts.dims(source) is None or not _keeps_order(node, source, facts):
            break
        value, node = source, source.producer()
    return value


def _keeps_order(node: ir.Node, source: ir.Value, facts: Facts) -> bool:
    """Whether a view moves nothing but axes of length 1."""
    dims = facts.dims(source) or ()
    if node.op_type == "Gather":
        axis: int = attribute(node, "axis", 0)
        picked = facts.dims(needed(node, 1)) if is_constant(needed(node, 1)) else None
        return dims[axis] == 1 and picked is not None and all(dim == 1 for dim in picked)
    if node.op_type != "Transpose":
        return True
    perm: list[int] = attribute(node, "perm", [*reversed(range(len(dims)))])
    moved = [axis for axis in perm if dims[axis] != 1]
    return moved == sorted(moved)


def ungrouped(value: ir.Value, heads: int, facts: Facts) -> tuple[ir.Value, int]:
    """A value of heads that are repeated, before that, with the number of heads there; itself where none are."""
    top = unviewed(value, facts)
    source = origin(top, "Expand")
    before, after = facts.dims(source), facts.dims(top)
    if source is None or before is None or after is None or len(before) != len(after):
        return top, heads
    wide = [axis for axis, (one, other) in enumerate(zip(before, after, strict=True)) if not facts.same(one, other)]
    count = math.prod(dim for dim in after[1 : wide[0]] if isinstance(dim, int)) if len(wide) == 1 else 0
    repeats = after[wide[0]] if count else 0
    if not isinstance(repeats, int) or before[wide[0]] != 1 or count * repeats != heads:
        return top, heads
    return unviewed(source, facts), count


def narrowed(value: ir.Value, axis: int, builder: Builder) -> ir.Value | None:
    """A value that does not vary along an axis, with length 1 there; None where it may vary."""
    facts, node = builder.facts, value.producer()
    dims, dtype = facts.dims(value), facts.dtype(value)
    if dims is None or dtype is None:
        return None
    if dims[axis] == 1:
        return value
    array = constant_array(value) if is_constant(value) else None
    if array is not None:
        first = np.take(array, [0], axis)
        return builder.constant(np.ascontiguousarray(first)) if bool((array == first).all()) else None
    if is_standard(node, "Expand") and node.inputs[0] is not None:
        return _before_repeats(node.inputs[0], axis, dims, builder)
    if is_standard(node, "Unsqueeze") and node.inputs[0] is not None:
        return _before_unsqueeze(node.inputs[0], axis, dims, builder)
    if not is_standard(node, "Softplus", *ELEMENTWISE):
        return None
    made: list[ir.Value] = []
    for item in node.inputs:
        own = facts.dims(item)
        place = None if own is None else axis - len(dims) + len(own)
        if item is None or place is None:
            return None
        found = item if place < 0 else narrowed(item, place, builder)
        if found is None:
            return None
        made.append(found)
    return builder.node(node.op_type, made, attributes(node), dims=_with_one(dims, axis), dtype=dtype)


def _with_one(dims: Dims, axis: int) -> Dims:
    return (*dims[:axis], 1, *dims[axis + 1 :])


def _before_repeats(source: ir.Value, axis: int, dims: Dims, builder: Builder) -> ir.Value | None:
    own = builder.facts.dims(source)
    if own is None or len(own) != len(dims) or own[axis] != 1:
        return None
    return builder.expand(source, _with_one(dims, axis))


def _before_unsqueeze(source: ir.Value, axis: int, dims: Dims, builder: Builder) -> ir.Value | None:
    own = builder.facts.dims(source)
    if own is None:
        return None
    kept = [place for place, dim in enumerate(dims) if dim != 1]
    inner = [place for place, dim in enumerate(own) if dim != 1]
    found = narrowed(source, inner[kept.index(axis)], builder) if len(kept) == len(inner) else None
    return None if found is None else builder.reshape(found, _with_one(dims, axis))


def in_order(value: ir.Value, places: Mapping[int, int], wanted: Sequence[int], builder: Builder) -> ir.Value:
    """A value with its axes in the order of what they are, all others of length 1, and 1 where it has none.

    Args:
        value: The value.
        places: The meaning of each of its axes, by its place; those that are nothing have length 1.
        wanted: The axes of the result.
        builder: Builds the views.
    """
    dims = dims_of(builder, value)
    order = [axis for item in wanted for axis, kind in places.items() if kind == item]
    rest = [axis for axis in range(len(dims)) if axis not in order]
    lengths = {kind: dims[axis] for axis, kind in places.items()}
    long = [axis for axis in order if dims[axis] != 1]
    if long != sorted(long):
        value = builder.transpose(value, [*order, *rest])
    return builder.reshape(unviewed(value, builder.facts), [lengths.get(item, 1) for item in wanted])
