"""Lanes: many channels followed through a graph at once, each from its own place.

A lane is one channel of an attention's head. Whatever takes channels apart and puts them together again (halves, every second
one, pairs on an axis of their own) changes, for each lane, its place along the axes that channels run over; the other axes it
leaves alone. So a value is laid out as usual, with a factor in it that stands still at another place for each lane.

    parts = pulled(IndexedValue(value, axes), facts)      # where each lane comes from, one operator further up
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, upward
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import REPEATS
from onnx_attnfuse.graph.rules.reading import slice_bounds, slice_length, split_lengths
from onnx_attnfuse.graph.sizes import Dim


class ChannelIndex(Factor):
    """A factor that stands still at another place for each lane."""

    __slots__ = ("places",)

    def __init__(self, size: int, places: Array) -> None:
        super().__init__(size, position=0)
        self.places = places
        """For each lane where it is; one place where it is the same for all."""

    def split(self, outer: Dim, inner: Dim) -> tuple[Factor, Factor]:
        """Makes this factor the product of two new ones."""
        assert isinstance(outer, int)
        assert isinstance(inner, int)
        self._parts = ChannelIndex(outer, self.places // inner), ChannelIndex(inner, self.places % inner)
        return self._parts


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the lanes of a value, and where they come from."""

    chosen: Array | None
    """Their numbers among the lanes; None: all."""
    indexed: IndexedValue


def spread(axes: Axes, channels: Axis) -> Axes | None:
    """`axes` with a lane for each channel in the place of the channels; None if their number is unknown."""
    parts = leaves(channels)
    count = length(parts)
    if not isinstance(count, int) or any(part.position is not None for part in parts):
        return None
    rest = np.arange(count)
    stand_ins: dict[Factor, Factor] = {}
    for part in reversed(parts):
        assert isinstance(part.size, int)
        stand_ins[part] = ChannelIndex(part.size, rest % part.size)
        rest = rest // part.size
    return tuple(tuple(stand_ins.get(leaf, leaf) for leaf in axis) for axis in refined(axes))


def joined(axes: Axes) -> Axes:
    """`axes` in terms of factors that are not split, lanes next to each other made one."""
    found: list[Axis] = []
    for axis in refined(axes):
        parts: list[Factor] = []
        for leaf in axis:
            last = parts[-1] if parts else None
            if isinstance(leaf, ChannelIndex) and isinstance(last, ChannelIndex):
                assert isinstance(leaf.size, int)
                assert isinstance(last.size, int)
                parts[-1] = ChannelIndex(last.size * leaf.size, last.places * leaf.size + leaf.places)
            else:
                parts.append(leaf)
        found.append(tuple(parts))
    return tuple(found)


def channels_of(axes: Axes) -> list[ChannelIndex]:
    """All factors of `axes` that are lanes, outermost first."""
    return [leaf for axis in refined(axes) for leaf in axis if isinstance(leaf, ChannelIndex)]


def subset(indexed: IndexedValue, chosen: Array | None) -> IndexedValue:
    """An indexed value restricted to some of its lanes; all of them where `chosen` is None."""
    if chosen is None:
        return indexed
    kept: dict[Factor, Factor] = {}
    for lanes in channels_of(indexed.axes):
        assert isinstance(lanes.size, int)
        kept[lanes] = ChannelIndex(lanes.size, lanes.places if len(lanes.places) == 1 else lanes.places[chosen])
    return IndexedValue(indexed.value, tuple(tuple(kept.get(leaf, leaf) for leaf in axis) for axis in refined(indexed.axes)))


def pulled(indexed: IndexedValue, facts: Facts) -> tuple[Part, ...] | None:
    """Where the lanes of a value come from, one operator further up, if that operator only moves elements; else None."""
    node = indexed.value.producer()
    if not is_standard(node):
        return None
    if node.op_type == "Concat":
        return _concat(node, indexed, facts)
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op_type == "Cast":
        return (Part(None, IndexedValue(source, indexed.axes)),) if facts.dtype(source) == facts.dtype(indexed.value) else None
    rule = _RULES.get(node.op_type)
    if rule is None:
        view = upward(indexed, facts, selecting=node.op_type in REPEATS)
        return None if view is None else (Part(None, view),)
    dims = facts.dims(source)
    axes = None if dims is None else rule(node, indexed, dims, facts)
    return None if axes is None else (Part(None, IndexedValue(source, axes)),)


def _places(axis: Axis, total: Dim) -> Array | None:
    """Where the lanes are along an axis of length `total`, if nothing else runs along it."""
    parts = joined((axis,))[0]
    if len(parts) == 1 and isinstance(parts[0], ChannelIndex) and parts[0].size == total:
        return parts[0].places
    return np.zeros(1, np.int64) if not parts and total == 1 else None


def _axis(size: int, places: Array) -> Axis:
    return () if size == 1 else (ChannelIndex(size, places),)


def _concat(node: ir.Node, indexed: IndexedValue, facts: Facts) -> tuple[Part, ...] | None:
    index: int = attribute(node, "axis", 0) % len(indexed.axes)
    dims = facts.dims(indexed.value)
    places = None if dims is None else _places(indexed.axes[index], dims[index])
    if places is None:
        return None
    parts: list[Part] = []
    start = 0
    for source in node.inputs:
        shape = None if source is None else facts.dims(source)
        size = None if shape is None else shape[index]
        if source is None or not isinstance(size, int):
            return None
        chosen: Array = np.flatnonzero((places >= start) & (places < start + size))
        if len(chosen):
            mine = None if len(chosen) == len(places) else chosen
            axes = subset(indexed, mine).axes
            parts.append(Part(mine, IndexedValue(source, replaced(axes, index, _axis(size, places[chosen] - start)))))
        start += size
    return tuple(parts)


def _slice(node: ir.Node, indexed: IndexedValue, dims: Dims, facts: Facts) -> Axes | None:
    bounds = slice_bounds(node, len(dims), facts)
    kept = facts.dims(indexed.value)
    if bounds is None or kept is None:
        return None
    axes = indexed.axes
    for index, (start, end, step) in bounds.items():
        total = dims[index]
        places = _places(axes[index], kept[index])
        if places is None:
            if step != 1 or slice_length(total, start, end, step) != total:
                return None
            continue
        if not isinstance(total, int) or not isinstance(start, int) or not isinstance(end, int):
            return None
        taken = range(total)[start:end:step]
        axes = replaced(axes, index, _axis(total, taken.start + taken.step * places))
    return axes


def _split(node: ir.Node, indexed: IndexedValue, dims: Dims, facts: Facts) -> Axes | None:
    lengths = split_lengths(node, facts)
    index: int = attribute(node, "axis", 0) % len(dims)
    total, number = dims[index], indexed.value.index()
    if lengths is None or number is None or not isinstance(total, int):
        return None
    before = lengths[:number]
    places = _places(indexed.axes[index], lengths[number])
    if places is None or not all(isinstance(size, int) for size in before):
        return None
    return replaced(indexed.axes, index, _axis(total, places + sum(size for size in before if isinstance(size, int))))


def _gather(node: ir.Node, indexed: IndexedValue, dims: Dims, facts: Facts) -> Axes | None:
    chosen = constant_array(node.inputs[1])
    index: int = attribute(node, "axis", 0) % len(dims)
    total = dims[index]
    if chosen is None or not isinstance(total, int) or total == 0:
        return None
    if chosen.ndim == 0:
        return (*indexed.axes[:index], _axis(total, chosen.reshape(1) % total), *indexed.axes[index:])
    places = _places(indexed.axes[index], chosen.size) if chosen.ndim == 1 else None
    return None if places is None else replaced(indexed.axes, index, _axis(total, chosen[places] % total))


_Rule = Callable[[ir.Node, IndexedValue, Dims, Facts], "Axes | None"]
_RULES: dict[str, _Rule] = {"Gather": _gather, "Slice": _slice, "Split": _split}
