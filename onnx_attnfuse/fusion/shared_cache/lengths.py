"""The number of positions in a cache, by the mask: its length is that of the past and the new positions together.

The past as an input is a buffer, so its own length says nothing any more. Whoever asked for it gets that of `earlier` instead,
the part of the mask that belongs to the past.

A source that writes into a buffer of a fixed length has an input that says where new keys go. It is the length of the past,
counted on for each row, and is none any more. A mask as long as the buffer is one as long as the positions so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.bodies import core
from onnx_attnfuse.fusion.shared_cache.decoder import TOTAL
from onnx_attnfuse.fusion.shared_cache.sites import CachedSite
from onnx_attnfuse.fusion.shared_cache.static import written_at
from onnx_attnfuse.graph.build import Builder, dims_of, dtype_of
from onnx_attnfuse.graph.edit import answer_shapes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim, Size, lone_atom, lone_symbol
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import is_copy, label, sources, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.group_query_attention import Buffered, Evicting
from onnx_attnfuse.verify.decoder_feeds import FilledSource

_INT, _SMALL = ir.DataType.INT64, ir.DataType.INT32
Padding = Literal["unknown", "anywhere", "after", "none"]
"""The zeros of a mask: unknown, as it gives lengths only; anywhere among the positions; after the tokens of a prompt; none."""
_MAX_TAKES_INTEGERS = 12
"""The opset from which on it does."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of a batch, as values of the graph."""

    earlier: ir.Value
    """The mask of the past, (b, past)."""
    new: ir.Value
    """The mask of the new positions, ones and zeros, (b, s) int32."""
    buffered: Buffered
    """What an operator takes; it counts new positions in each entry where somebody asks."""
    readers: frozenset[ir.Node]
    """The nodes that read the mask for all this."""
    counts_ones: bool
    """Whether the place of the last key is given by the number of ones, wherever they are."""

    def ends_anywhere(self, mask: ir.Value) -> bool:
        """Whether zeros may follow the text of the mask, as nothing asks where it ends or how many positions are past."""
        return self.counts_ones and {node for node, _ in mask.uses()} <= self.readers and not self.earlier.uses()


def read_lengths(
    builder: Builder,
    mask: ir.Value,
    batch: Dim,
    new: Dim,
    past: Size,
    padding: Padding,
    *,
    on_host: bool = False,
    takes_counts: bool = False,
    evicts: bool = False,
) -> Lengths:
    """Emits the lengths, and makes the mask what the number of earlier positions is read from.

    Only real tokens of the past count, as only these stay in the buffer. All new ones count: where there is padding among them it
    follows the real ones, which do not see it, and the next ones take its place. Padding that is in a prompt alone, or
    nowhere, leaves a rule that does not ask where the text ends: all ones of the mask count, and in a prompt as many as are new.

    Args:
        builder: The builder.
        mask: The input (b, past + s).
        batch: The number of entries.
        new: The number of new positions.
        past: The symbol for the number of earlier ones.
        padding: Where the mask has zeros; where it tells lengths only, they count too.
        on_host: Sizes lie where the model runs, so that a size is no copy to a device.
        takes_counts: The operator takes the number of new positions, all of them in each entry.
        evicts: A buffer keeps no more than a window.
    """
    facts, dtype, others = builder.facts, builder.facts.dtype(mask), {node for node, _ in mask.uses()}
    start, end, axis = builder.shape([new * -1]), builder.constant([np.iinfo(np.int64).max]), builder.constant([1])
    earlier = builder.node("Slice", [mask, builder.constant([0]), start, axis], dims=[batch, past], dtype=dtype)
    facts.origins[past.atoms[0].key] = (earlier, 1)
    total = builder.cast(builder.reshape(builder.length(mask, 1), []), _SMALL)
    kept = builder.cast(mask, ir.DataType.BOOL)
    ones = builder.cast(kept, _SMALL)
    current = builder.node("Slice", [ones, start, end, axis], dims=[batch, new], dtype=_SMALL)
    counted = builder.reduce("ReduceSum", ones, [1], keep=False)  # where the mask lies: a length would be copied to a GPU
    real = counted
    counts_ones = padding == "none" or (padding == "after" and builder.opset >= _MAX_TAKES_INTEGERS)
    if not counts_ones:
        rest = builder.constant(np.asarray(1, np.int32))
        zeros = builder.elementwise("Sub", [rest, ones if padding == "unknown" else current])
        uncounted = builder.reduce("ReduceSum", zeros, [1], keep=False)
        counted = builder.elementwise("Add", [counted, uncounted])
    elif padding == "after":
        counted = builder.elementwise("Max", [counted, _width(builder, current, new, on_host=on_host)])
    last = builder.elementwise("Sub", [counted, builder.constant(np.asarray(1, np.int32))])
    counts = builder.expand(builder.cast(builder.shape([new]), _SMALL), [batch]) if takes_counts or evicts else None
    evicting = None if counts is None or not evicts else _evicting(builder, real, current, last, counts, padding)
    readers = frozenset(node for node, _ in mask.uses() if node not in others)
    buffered = Buffered(last, total, facts.fresh(kept, 1), counts=counts if takes_counts else None, evicting=evicting)
    return Lengths(earlier, current, buffered, readers, counts_ones)


def _evicting(
    builder: Builder, real: ir.Value, current: ir.Value, last: ir.Value, counts: ir.Value, padding: Padding
) -> Evicting:
    """Lengths for a buffer that padding may not enter, as it would drive tokens out; an entry has one token at least.

    Args:
        builder: The builder.
        real: How many ones the mask has, (b) int32.
        current: The mask of the new positions, (b, s) int32.
        last: The place of the last key, where all new positions count, (b) int32.
        counts: The number of new positions, (b) int32.
        padding: Where the mask has zeros.
    """
    if padding in {"unknown", "none"}:
        return Evicting(last, counts, None)
    one = builder.constant(np.asarray(1, np.int32))
    tokens = builder.elementwise("Max", [real, one])
    last = builder.elementwise("Sub", [tokens, one])
    batch, new = dims_of(builder, current)
    if padding == "after":
        counts = builder.elementwise("Min", [tokens, counts])
        ends = builder.reshape(builder.cast(counts, _INT), [batch, 1])
        written = builder.elementwise("Less", [core.places(builder, new), ends], ir.DataType.BOOL)
    else:
        fresh = builder.reduce("ReduceSum", current, [1], keep=False)
        counts = builder.elementwise("Sub", [tokens, builder.elementwise("Sub", [real, fresh])])
        written = builder.cast(current, ir.DataType.BOOL)
    return Evicting(last, counts, builder.reshape(written, [batch, new, 1]))


def _width(builder: Builder, current: ir.Value, new: Dim, *, on_host: bool) -> ir.Value:
    """The number of new positions, int32: one for all entries, or for each and counted where the mask lies."""
    if isinstance(new, int):
        return builder.constant(np.asarray(new, np.int32))
    if on_host:
        return builder.cast(builder.shape([new]), _SMALL)
    every = builder.elementwise("Equal", [current, current])
    return builder.reduce("ReduceSum", builder.cast(every, _SMALL), [1], keep=False)


def answer_for_past(builder: Builder, past: ir.Value) -> None:
    """Gives whoever asks for the length of a past the number of earlier positions, also where a copy of it is asked."""
    for node in [node for node, _ in past.uses() if is_copy(node)]:
        copy = node.outputs[0]
        answer_for_past(builder, copy)
        copy.replace_all_uses_with(past)
        sweep([copy])
    answer_shapes(past, builder)


_CACHE_AXES = 4


def source_of(site: CachedSite, facts: Facts) -> FilledSource | None:
    """How the source of a site is run in a loop; None where its cache grows."""
    filled = site.filled
    if filled is None:
        return None
    dims = facts.dims(site.mask)
    return FilledSource(filled.position.name or "", filled.length, masks_buffer=dims is not None and dims[1] == filled.length)


def prepare(graph: ir.Graph, builder: Builder, site: CachedSite, mask: ir.Value) -> None:
    """Makes lengths known by inputs that stay: that of the new positions, and that of all of them.

    Raises:
        Refused: The number of new positions is known of the input that goes only.
    """
    filled, facts = site.filled, builder.facts
    if filled is None:
        return
    new = length(site.spec.axes.i)
    if isinstance(new, Size):
        others = [value for value in graph.inputs if value not in {filled.position, mask}]
        places = [(value, axis) for value in others for axis, dim in enumerate(facts.dims(value) or ()) if dim == new]
        if not places or lone_atom(new) is None:
            raise Refused("cache-kept", f"only '{filled.position.name}' says how many positions are new", site.spec.name)
        facts.origins[new.atoms[0].key] = places[0]
    dims = dims_of(builder, mask)
    if isinstance(filled.length, Size):
        own = {mask, *site.past}
        if lone_symbol(filled.length) is None:
            raise Refused("cache-kept", "the buffer length is not a size that the caller can choose", site.spec.name)
        if any(filled.length in (facts.dims(value) or ()) for value in graph.inputs if value not in own and not _is_cache(value)):
            raise Refused("cache-kept", "an input that is neither a cache nor its mask is as long as the buffer", site.spec.name)
        facts.origins[filled.length.atoms[0].key] = (mask, 1)
    if site.mask is not None and dims[1] == filled.length:
        facts.record(mask, (dims[0], site.past_length + new), None)
        mask.shape = ir.Shape([*(() if mask.shape is None else mask.shape.dims[:1]), TOTAL])


def _is_cache(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == _CACHE_AXES


def grow(builder: Builder, sites: Sequence[CachedSite]) -> None:
    """Makes the keys and values of sources with a buffer as long as the positions that they hold."""
    for site in sites:
        for indexed in (*site.cache.past, *site.cache.present) if site.filled is not None else ():
            builder.facts.record(indexed.value, [length(axis) for axis in indexed.axes], None)


def finish_source(graph: ir.Graph, builder: Builder, sites: Sequence[CachedSite], mask: ir.Value) -> None:
    """Counts positions where they were given, and gives the rest of the source a mask as long as its buffer.

    Raises:
        Refused: Something else looks at a buffer.
    """
    filled = sites[0].filled
    if filled is None:
        return
    own = set(builder.added)
    users = [node for node in dict.fromkeys(node for node, _ in mask.uses()) if node not in own]
    for site in sites:
        assert site.filled is not None
        for written in site.filled.written:
            sweep([written])
            if written.graph is not None:
                raise Refused(
                    "cache-used", f"'{written.name}', a buffer with the new keys or values, has other consumers", site.spec.name
                )
    for site in sites:
        for past in site.past:
            sweep([output for node in viewers(past) for output in node.outputs])
            if len(set(viewers(past))) > 1:
                raise Refused("cache-used", f"the past keys or values '{past.name}' have other consumers", site.spec.name)
    _check_all_taken(graph, filled.position)
    builder.at(next(iter(graph)))
    _count_positions(graph, builder, sites[0])
    if sites[0].mask is not None and not isinstance(filled.length, Size):
        _fill_mask(builder, mask, [node for node in users if node.graph is graph], filled.length)


def _check_all_taken(graph: ir.Graph, position: ir.Value) -> None:
    """Checks that nothing is written at the position any more, as a caller would have to hand in a buffer for that.

    Raises:
        Refused: Something is.
    """
    for node in graph:
        indices = written_at(node)
        if indices is not None and position in sources([indices]):
            message = f"'{label(node)}' writes at '{position.name}' too, and not into the cache of an attention"
            raise Refused("cache-kept", message, label(node))


def _fill_mask(builder: Builder, mask: ir.Value, users: Sequence[ir.Node], whole: Dim) -> None:
    """Gives readers of a mask as long as the source's buffer one padded with zeros after the positions so far."""
    dims = dims_of(builder, mask)
    if dims[1] == whole or not users:
        return
    ends = builder.shape([0, 0, 0, whole - dims[1]])
    number = builder.cast(mask, _INT)
    padded = builder.node("Pad", [number, ends], dims=[dims[0], whole], dtype=_INT)
    filled = builder.cast(padded, dtype_of(builder, mask))
    for node in users:
        for place, value in enumerate(node.inputs):
            if value is mask:
                node.replace_input_with(place, filled)


def _count_positions(graph: ir.Graph, builder: Builder, site: CachedSite) -> None:
    """Puts positions counted on from the length of the past in place of the input that gave them."""
    assert site.filled is not None
    given = site.filled.position
    dims, first = dims_of(builder, given), builder.shape([site.past_length])
    if dims == (length(site.spec.axes.i),):
        start, end = (builder.reshape(value, []) for value in (first, builder.shape([site.past_length + dims[0]])))
        found = builder.node("Range", [start, end, builder.constant(np.asarray(1))], dims=dims, dtype=_INT)
    else:
        found = builder.reshape(first, dims)
    given.replace_all_uses_with(builder.cast(found, dtype_of(builder, given)))
    graph.inputs.remove(given)
