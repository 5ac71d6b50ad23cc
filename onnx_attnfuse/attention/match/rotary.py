"""Rotary position embedding, read by what it computes however it is spelled.

    found = read_rotary(indexed, channels, facts)      # the value that is rotated, and by what

    result[first]  = cos · x[first]  - sin · x[second]
    result[second] = cos · x[second] + sin · x[first]

The result is a linear form (`linear_forms`) in some value above it; the nearest for which the form is this rotation of pairs is
the one. Both channels of a pair must have the same cosine and the same sine, which is proven (`channel_equality`); nothing is
asked of cos² + sin². What is rotated only in some rows, or in pairs of another order, is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnx_attnfuse.attention.axes.channels import ChannelIndex, channels_of, joined, pulled, spread
from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined, regroup, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.channel_equality import Labels, columns_in
from onnx_attnfuse.attention.match.linear_forms import SUMS, ChannelTerm, Unreadable, below, candidates, read_terms, region_above
from onnx_attnfuse.attention.spec import Rotary, Table
from onnx_attnfuse.graph.constants import Array, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32
from onnx_attnfuse.graph.facts import Facts


def read_rotary(indexed: IndexedValue, channels: Axis, facts: Facts) -> tuple[IndexedValue, Rotary] | None:
    """The value that `indexed` is a rotation of, laid out in the same factors, and the rotation; None if it is none.

    Args:
        indexed: A value and its axes.
        channels: The channels of a head.
        facts: Shapes and types.
    """
    axes, size = spread(indexed.axes, channels), length(channels)
    if axes is None or not isinstance(size, int) or not _may_be_one(IndexedValue(indexed.value, axes), facts):
        return None
    start = ChannelTerm(np.arange(size), IndexedValue(indexed.value, axes), np.ones(size, np.int64))
    region = region_above(indexed.value)
    for root in candidates(region):
        inside = below(root, region)
        try:
            terms = [*read_terms(start, root, inside, facts)]
            base, shift = _root(terms, start, channels)
            rotary = _rotation(terms, shift, start, channels, facts)
        except Unreadable:
            continue
        if _is_repeated(base, rotary, facts):
            return None
        nodes = dict.fromkeys(value.producer() for value in region if value in inside and value is not root)
        return base, dataclasses.replace(rotary, nodes=tuple(node for node in nodes if node is not None))
    return None


def _is_repeated(base: IndexedValue, rotary: Rotary, facts: Facts) -> bool:
    """Whether a table may be longer than what it rotates, which the source then repeats."""
    lengths = {axis: dim for dim, axis in zip(facts.dims(base.value) or (), refined(base.axes), strict=False)}
    for table in (rotary.cos, rotary.sin):
        for dim, axis in zip(facts.dims(table.indexed.value) or (), refined(table.indexed.axes), strict=False):
            if axis and axis in lengths and facts.may_exceed(lengths[axis], dim):
                return True
    return False


def _may_be_one(indexed: IndexedValue, facts: Facts) -> bool:
    """Whether the last operator leaves a chance, which that of most operands does not."""
    node = indexed.value.producer()
    if not is_standard(node) or facts.dtype(indexed.value) not in FLOATS_TO_32:
        return False
    if node.op_type == "Concat":
        return pulled(indexed, facts) is not None
    return node.op_type in {"Cast", "RotaryEmbedding"} or (node.op_type in SUMS and not any(map(is_constant, node.inputs)))


def _root(terms: Sequence[ChannelTerm], start: ChannelTerm, channels: Axis) -> tuple[IndexedValue, int]:
    """The value that all terms are in, in the factors of the result, and which of its channels is the first."""
    layouts = [joined(term.indexed.axes) for term in terms]
    if any(_shape(axes) != _shape(layouts[0]) for axes in layouts) or {*_others(layouts[0])} != {*_others(start.indexed.axes)}:
        raise Unreadable
    size = len(start.channels)
    sizes = [lanes.size for lanes in channels_of(layouts[0])]
    total = length(channels_of(layouts[0]))
    shift = min(int(_places(axes).min()) for axes in layouts) // size * size
    if not isinstance(total, int) or total % size:
        raise Unreadable
    packed: Axis = () if total == size else (Factor(total // size, shift // size),)
    parts = regroup([packed, leaves(channels)], sizes)
    if parts is None:
        raise Unreadable
    rest = iter(parts)
    axes = tuple(
        tuple(part for leaf in axis for part in (next(rest) if isinstance(leaf, ChannelIndex) else (leaf,)))
        for axis in layouts[0]
    )
    return IndexedValue(terms[0].indexed.value, axes), shift


def _shape(axes: Axes) -> list[list[object]]:
    return [[leaf.size if isinstance(leaf, ChannelIndex) else leaf for leaf in axis] for axis in axes]


def _others(axes: Axes) -> list[Factor]:
    """The factors that are no lanes, in their order."""
    return [leaf for axis in refined(axes) for leaf in axis if not isinstance(leaf, ChannelIndex)]


def _places(axes: Axes) -> Array:
    """Where each lane is among the channels of a value."""
    place: Array = np.zeros(1, np.int64)
    for lanes in channels_of(axes):
        assert isinstance(lanes.size, int)
        place = place * lanes.size + lanes.places
    return place


class _Side:
    """The coefficients with which channels enter their own results, or those of their partners."""

    def __init__(self, size: int, labels: Labels, facts: Facts) -> None:
        self.source = np.full(size, -1)
        """For each channel of the result the channel that is multiplied; -1: none."""
        self._names: Array = np.zeros(size, np.int64)
        self._signs: Array = np.zeros(size, np.int64)
        self._terms: list[ChannelTerm] = []
        self._labels = labels
        self._facts = facts

    def enter(self, term: ChannelTerm, source: Array) -> None:
        """Adds a term."""
        assert term.coefficient is not None
        if (self.source[term.channels] >= 0).any():
            raise Unreadable
        named = columns_in(self._facts).of(term.coefficient, len(term.channels), self._labels)
        self.source[term.channels] = source
        self._names[term.channels] = named.names
        self._signs[term.channels] = named.signs * term.signs
        self._terms.append(term)

    def agrees(self, first: Array, second: Array, sign: int) -> bool:
        """Whether both channels of every pair have the same coefficient, times `sign` in the second."""
        same = self._names[first] == self._names[second]
        return bool(same.all() and (self._signs[first] * sign == self._signs[second]).all())

    def table(self, first: Array, sign: int) -> Table:
        """The table of cosines or sines that has the coefficients of the `first` channels, times `sign`."""
        for term in self._terms:
            order = {channel: place for place, channel in enumerate(term.channels.tolist())}
            if all(channel in order for channel in first.tolist()):
                chosen = term.of(np.asarray([order[channel] for channel in first.tolist()]))
                signs = np.broadcast_to(chosen.signs, first.shape) * sign
                table = None if chosen.coefficient is None else _table(chosen.coefficient, len(first), self._facts)
                if table is not None and (signs == signs[0]).all():
                    return dataclasses.replace(table, negative=bool(signs[0] < 0))
        raise Unreadable


def _rotation(terms: Sequence[ChannelTerm], shift: int, start: ChannelTerm, channels: Axis, facts: Facts) -> Rotary:
    """The rotation that the terms are together."""
    size, labels = len(start.channels), {leaf: number for number, leaf in enumerate(_others(start.indexed.axes))}
    kept: Array = np.zeros(size, np.int64)
    main, cross = _Side(size, labels, facts), _Side(size, labels, facts)
    for term in terms:
        place = np.broadcast_to(_places(joined(term.indexed.axes)) - shift, term.channels.shape)
        own = place == term.channels
        if term.coefficient is None:
            if not own.all() or not (term.signs == 1).all():
                raise Unreadable
            kept[term.channels] += 1
            continue
        for side, chosen in ((main, np.flatnonzero(own)), (cross, np.flatnonzero(~own))):
            if len(chosen):
                side.enter(term.of(chosen), place[chosen])
    turned = (main.source >= 0) & (cross.source >= 0) & (kept == 0)
    stays = (main.source < 0) & (cross.source < 0) & (kept == 1)
    width = int(turned.sum())
    if width < 2 or width % 2 or not turned[:width].all() or not stays[width:].all():
        raise Unreadable
    first, interleaved = _pairs(cross.source[:width])
    second = cross.source[first]
    if not main.agrees(first, second, 1) or not cross.agrees(first, second, -1):
        raise Unreadable
    return Rotary(main.table(first, 1), cross.table(first, -1), leaves(channels), width, interleaved)


def _pairs(partner: Array) -> tuple[Array, bool]:
    """The first channel of each pair, and whether its partner is the next one rather than the one half the width on."""
    channels, half = np.arange(len(partner)), len(partner) // 2
    if np.array_equal(partner, (channels + half) % len(partner)):
        return channels[:half], False
    if np.array_equal(partner, channels ^ 1):
        return channels[::2], True
    raise Unreadable


def _table(indexed: IndexedValue, pairs: int, facts: Facts) -> Table | None:
    """The coefficients as columns of a value, as far up as they can be had, so that all layers share it."""
    best: Table | None = None
    while True:
        found = _columns_of(indexed, pairs, facts)
        if found is not None and (best is None or found.axis == len(found.indexed.axes) - 1):
            best = found
        parts = pulled(indexed, facts)
        if parts is None or len(parts) != 1:
            return best
        indexed = parts[0].indexed


def _columns_of(indexed: IndexedValue, pairs: int, facts: Facts) -> Table | None:
    """Lanes that are columns at equal distances."""
    axes, dims = joined(indexed.axes), facts.dims(indexed.value)
    if dims is None or facts.dtype(indexed.value) not in FLOATS_TO_32:
        return None
    held = [index for index, axis in enumerate(axes) if any(isinstance(leaf, ChannelIndex) for leaf in axis)]
    if not held and pairs == 1:
        held = [index for index, dim in enumerate(dims) if dim == 1][-1:]
    if len(held) != 1 or len(axes[held[0]]) > 1:
        return None
    index, places = held[0], channels_of((axes[held[0]],))[0].places if axes[held[0]] else np.zeros(1, np.int64)
    size, step = dims[index], int(places[1] - places[0]) if len(places) > 1 else 1
    if size != length(axes[index]) or step < 1 or not np.array_equal(places, places[0] + step * np.arange(len(places))):
        return None
    columns = IndexedValue(indexed.value, replaced(axes, index, (Factor(size),)))
    return Table(columns, index, int(places[0]), step)
