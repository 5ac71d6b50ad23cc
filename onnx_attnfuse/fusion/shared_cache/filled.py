"""The interface of a source that writes into a buffer of a fixed length: positions given there are counted here.

The input that says where new keys go is the length of the past, counted on for each row, and is none any more. A mask as long as
the buffer is one as long as the positions so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.fusion.shared_cache.interface import TOTAL
from onnx_attnfuse.fusion.shared_cache.sites import CachedSite
from onnx_attnfuse.fusion.shared_cache.static import written_at
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import label, sources, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.decoder_feeds import FilledSource

_INT = ir.DataType.INT64
_CACHE_AXES = 4


def source_of(site: CachedSite, facts: Facts) -> FilledSource | None:
    """How the source of a site is run in a loop; None where its cache grows."""
    filled = site.filled
    if filled is None:
        return None
    dims = None if site.mask is None else facts.dims(site.mask)
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
        if not places or new.factor != 1 or len(new.atoms) != 1:
            raise Refused("cache-kept", f"only '{filled.position.name}' says how many positions are new", site.spec.name)
        facts.origins[new.atoms[0].key] = places[0]
    dims = facts.dims(mask)
    assert dims is not None
    if isinstance(filled.length, Size):
        own = {mask, *site.past}
        if filled.length.factor != 1 or len(filled.length.atoms) != 1 or filled.length.atoms[0].evaluate is not None:
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
    dims, dtype = builder.facts.dims(mask), builder.facts.dtype(mask)
    if dims is None or dims[1] == whole or not users:
        return
    ends = builder.shape([0, 0, 0, whole - dims[1]])
    number = builder.cast(mask, _INT)
    padded = builder.node("Pad", [number, ends], dims=[dims[0], whole], dtype=_INT)
    assert dtype is not None
    filled = builder.cast(padded, dtype)
    for node in users:
        for place, value in enumerate(node.inputs):
            if value is mask:
                node.replace_input_with(place, filled)


def _count_positions(graph: ir.Graph, builder: Builder, site: CachedSite) -> None:
    """Puts positions counted on from the length of the past in place of the input that gave them."""
    assert site.filled is not None
    given = site.filled.position
    dims, dtype = builder.facts.dims(given), builder.facts.dtype(given)
    first = builder.shape([site.past_length])
    assert dims is not None
    assert dtype is not None
    if dims == (length(site.spec.axes.i),):
        start, end = (builder.reshape(value, []) for value in (first, builder.shape([site.past_length + dims[0]])))
        found = builder.node("Range", [start, end, builder.constant(np.asarray(1))], dims=dims, dtype=_INT)
    else:
        found = builder.reshape(first, dims)
    given.replace_all_uses_with(builder.cast(found, dtype))
    graph.inputs.remove(given)
