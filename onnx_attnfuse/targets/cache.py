"""Keys and values of earlier positions handed to an operator that appends the new ones itself."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, length
from onnx_attnfuse.attention.axes.rearrange import arrange, is_view
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import AttentionSpec, Cache
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Reason


def refuse_cache(spec: AttentionSpec, kv_heads: Axis) -> Reason | None:
    """Why no operator can append to the cache of `spec`, or None if one can."""
    cache = spec.cache
    if cache is None:
        return Reason("no-cache", "keys and values are not appended to earlier ones")
    axes = spec.axes
    if length(axes.h) != length(axes.v):
        return Reason("v-head-size", "a cache wants values of the head size of the keys")
    for columns, pair in ((cache.past_axis, cache.past), (axes.j, cache.present)):
        for indexed, channels in zip(pair, (axes.h, axes.v), strict=True):
            if not is_view(indexed, cache_layout(spec, kv_heads, columns, channels)):
                return Reason("cache-layout", f"'{indexed.value.name}' is not laid out as batch, heads, positions, channels")
    return None


def past(builder: Builder, spec: AttentionSpec, cache: Cache, kv_heads: Axis) -> tuple[ir.Value, ir.Value]:
    """Keys and values of earlier positions as (b, n, p, h)."""
    axes = spec.axes
    key, value = (
        arrange(builder, indexed, cache_layout(spec, kv_heads, cache.past_axis, channels))
        for indexed, channels in zip(cache.past, (axes.h, axes.v), strict=True)
    )
    return key, value


def presents(
    builder: Builder, spec: AttentionSpec, cache: Cache, kv_heads: Axis, node: ir.Node
) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """The keys and values that the operator `node` gives out in the source's layout, beside those they take the place of."""
    axes = spec.axes
    found: list[tuple[ir.Value, ir.Value]] = []
    for old, output, channels in zip(cache.present, node.outputs[1:3], (axes.h, axes.v), strict=True):
        layout = cache_layout(spec, kv_heads, axes.j, channels)
        builder.facts.record(output, [length(axis) for axis in layout], spec.dtype)
        found.append((old.value, arrange(builder, IndexedValue(output, layout), old.axes)))
    return tuple(found)


def is_single(builder: Builder, spec: AttentionSpec) -> ir.Value:
    """One truth value: there is one entry, or one new position in each, or nothing is cached."""
    assert spec.cache is not None
    limits = ((spec.axes.b, 1), (spec.axes.i, 1), (spec.cache.past_axis, 0))
    return builder.logical("Or", [_at_most(builder, length(axis), most) for axis, most in limits])


def _at_most(builder: Builder, dim: Dim, most: int) -> ir.Value:
    seen = builder.elementwise("LessOrEqual", [builder.shape([dim]), builder.constant([most])])
    return builder.reshape(seen, [])


def cache_layout(spec: AttentionSpec, kv_heads: Axis, columns: Axis, channels: Axis) -> Axes:
    """The layout of a cache that operators take: batch, heads, positions, channels."""
    return spec.axes.b, kv_heads, columns, channels
