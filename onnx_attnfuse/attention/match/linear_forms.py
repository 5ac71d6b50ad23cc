"""A value as a linear form in the channels of another, further up.

    region = region_above(value)
    for root in candidates(region):
        terms = read_terms(start, root, below(root, region), facts)

Each channel is followed upwards by itself: through sums, products with a coefficient, and whatever moves elements.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.channels import ChannelIndex, channels_of, joined, pulled, subset
from onnx_attnfuse.attention.axes.factors import Axes
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS, SLICES

SUMS = frozenset(["Add", "Sub"])
_MAX_REGION_VALUES = 96
"""Values looked at."""
_OF_ALL = SUMS | {"Concat", "Mul"}
_OF_FIRST = REARRANGES | REPEATS | SLICES | CASTS | {"Gather", "Neg"}
_TURNING = "RotaryEmbedding"

Region = dict[ir.Value, list[ir.Value]]
"""Values above an operand, nearest first, each with those it may be a linear form of."""


class Unreadable(Exception):
    """A value is no linear form in the channels of the root."""


@dataclasses.dataclass(frozen=True)
class ChannelTerm:
    """`signs · coefficient · indexed`, for some channels of the result."""

    channels: Array
    indexed: IndexedValue
    signs: Array
    coefficient: IndexedValue | None = None

    def of(self, chosen: Array | None) -> ChannelTerm:
        """The term for some of its channels; for all where `chosen` is None."""
        if chosen is None:
            return self
        coefficient = None if self.coefficient is None else subset(self.coefficient, chosen)
        return ChannelTerm(self.channels[chosen], subset(self.indexed, chosen), self.signs[chosen], coefficient)


def region_above(start: ir.Value) -> Region:
    """The values that `start` may be a linear form of, and those between."""
    found: Region = {start: []}
    pending = [start]
    for value in pending:
        node = value.producer()
        if not is_standard(node) or len(found) > _MAX_REGION_VALUES:
            continue
        sources = node.inputs if node.op_type in _OF_ALL else node.inputs[:1] if node.op_type in _OF_FIRST else ()
        sources = [node.inputs[0]] * 2 if node.op_type == _TURNING else sources
        found[value] = [source for source in sources if source is not None and not is_constant(source)]
        fresh = [source for source in dict.fromkeys(found[value]) if source not in found]
        found.update((source, []) for source in fresh)
        pending += fresh
    return found


def candidates(region: Region) -> list[ir.Value]:
    """Values that are used more than once, nearest first."""
    uses = Counter(source for sources in region.values() for source in sources)
    return [value for value in region if uses[value] > 1]


def below(root: ir.Value, region: Region) -> set[ir.Value]:
    """The values that are computed from `root`, itself among them."""
    users: dict[ir.Value, list[ir.Value]] = {}
    for value, sources in region.items():
        for source in sources:
            users.setdefault(source, []).append(value)
    found = {root}
    pending = [root]
    while pending:
        fresh = [user for user in users.get(pending.pop(), ()) if user not in found]
        found.update(fresh)
        pending += fresh
    return found


def read_terms(term: ChannelTerm, root: ir.Value, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    """A term as a sum of terms in `root`.

    Args:
        term: Where to start.
        root: What the terms are to be in.
        inside: The values that are computed from it.
        facts: Shapes and types.

    Raises:
        Unreadable: It is none.
    """
    value, node = term.indexed.value, term.indexed.value.producer()
    if value is root:
        yield term
        return
    if node is None or value not in inside:
        raise Unreadable
    for inner in _READERS.get(node.op_type, _moved)(term, node, inside, facts):
        yield from read_terms(inner, root, inside, facts)


def _moved(term: ChannelTerm, node: ir.Node, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    parts = pulled(term.indexed, facts)
    if parts is None:
        raise Unreadable
    for part in parts:
        yield dataclasses.replace(term.of(part.chosen), indexed=part.indexed)


def _added(term: ChannelTerm, node: ir.Node, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    first, second = (_operand(value, term.indexed, facts) for value in node.inputs)
    yield dataclasses.replace(term, indexed=first)
    yield dataclasses.replace(term, indexed=second, signs=-term.signs if node.op_type == "Sub" else term.signs)


def _negated(term: ChannelTerm, node: ir.Node, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    yield dataclasses.replace(term, indexed=_operand(node.inputs[0], term.indexed, facts), signs=-term.signs)


def _cast(term: ChannelTerm, node: ir.Node, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    source = _operand(node.inputs[0], term.indexed, facts)
    if facts.dtype(source.value) not in FLOATS_TO_32:
        raise Unreadable
    yield dataclasses.replace(term, indexed=source)


def _multiplied(term: ChannelTerm, node: ir.Node, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    """The terms of the factor inside the region, the factor outside as their coefficient."""
    first, second = node.inputs
    if (first in inside) == (second in inside):
        raise Unreadable
    inner, other = (first, second) if first in inside else (second, first)
    indexed, factor = _operand(inner, term.indexed, facts), _operand(other, term.indexed, facts)
    signs = _signs(factor, facts)
    if signs is not None:
        yield dataclasses.replace(term, indexed=indexed, signs=term.signs * signs)
        return
    if term.coefficient is not None:
        raise Unreadable
    yield dataclasses.replace(term, indexed=indexed, coefficient=factor)


def _turned(term: ChannelTerm, node: ir.Node, inside: set[ir.Value], facts: Facts) -> Iterator[ChannelTerm]:
    """The terms of an ai.onnx RotaryEmbedding whose tables have one row for each row of its input."""
    dims, axes, (source, cos, sin, *positions) = facts.dims(term.indexed.value), joined(term.indexed.axes), node.inputs
    if dims is None or source is None or any(positions) or not axes[-1] or term.coefficient is not None:
        raise Unreadable
    lanes = axes[-1][-1]
    head = dims[-1] if len(dims) == 4 else sizes.exact_quotient(dims[-1], attribute(node, "num_heads", 0))
    if not isinstance(lanes, ChannelIndex) or not isinstance(head, int) or lanes.size != head or len(channels_of(axes)) != 1:
        raise Unreadable
    width: int = attribute(node, "rotary_embedding_dim", 0) or head
    where: Array = np.broadcast_to(lanes.places, term.channels.shape)
    kept, moved = np.flatnonzero(where >= width), np.flatnonzero(where < width)
    if len(kept):
        yield dataclasses.replace(term.of(kept), indexed=subset(IndexedValue(source, axes), kept))
    if not len(moved):
        return
    where, term, half = where[moved], term.of(moved), width // 2
    interleaved = bool(attribute(node, "interleaved", 0))
    pair, partner = (where // 2, where ^ 1) if interleaved else (where % half, (where + half) % width)
    for table, place, signs in ((cos, where, term.signs), (sin, partner, np.where(where < partner, -1, 1) * term.signs)):
        rows: Axes = (axes[0], axes[-2], (ChannelIndex(half, pair),))
        coefficient = None if table is None or facts.rank(table) != 3 else aligned(table, rows, facts)
        if table is None or coefficient is None:
            raise Unreadable
        indexed = IndexedValue(source, (*axes[:-1], (*axes[-1][:-1], ChannelIndex(head, place))))
        yield dataclasses.replace(term, indexed=indexed, signs=signs, coefficient=IndexedValue(table, coefficient))


def _signs(factor: IndexedValue, facts: Facts) -> Array | None:
    """A constant factor of 1 and -1, for each channel."""
    number = facts.number(factor.value)
    if number is not None:
        return np.asarray([int(number)]) if abs(number) == 1 else None
    array, lanes = constant_array(factor.value), channels_of(joined(factor.axes))
    if array is None or len(lanes) != 1 or array.size != lanes[0].size or not bool((abs(array) == 1).all()):
        return None
    signs: Array = array.reshape(-1)[lanes[0].places].astype(np.int64)
    return signs


def _operand(value: ir.Value | None, indexed: IndexedValue, facts: Facts) -> IndexedValue:
    axes = None if value is None else aligned(value, indexed.axes, facts)
    if value is None or axes is None:
        raise Unreadable
    return IndexedValue(value, axes)


_READERS = {"Add": _added, "Cast": _cast, "Mul": _multiplied, "Neg": _negated, "Sub": _added, _TURNING: _turned}
