"""Layouts around the operator of a target: operands into its layout before it, rows and factors of the result after it.

Keys and values of earlier positions are handed to an operator that appends the new ones itself. A sink, for operators that know
none, is a key of zeros whose bias is the sink, and a value of zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves, length, named, refined
from onnx_attnfuse.attention.axes.rearrange import arrange, cost, einops, is_view
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import AttentionSpec, Axes4, Cache, Layouts, Rotary, Source
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32, type_name
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import producer_of, viewers
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets.base import Emitted
from onnx_attnfuse.targets.fully_masked_rows import Rows
from onnx_attnfuse.targets.masked_rows import Refill, apply_rows, scale_rows
from onnx_attnfuse.targets.rotary import can_empty, factors_of, is_same, rotated, takes


def refuse_cache(spec: AttentionSpec, kv_heads: Axis) -> Reason | None:
    """Why no operator can append to the cache of `spec`, or None if one can."""
    cache = spec.cache
    if cache is None:
        return Reason("no-cache", "keys and values are not appended to earlier ones")
    axes = spec.axes
    if length(axes.h) != length(axes.v):
        return Reason("v-head-size", "a cache needs values of the head size of the keys")
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
    return builder.chained("Or", [_at_most(builder, length(axis), most) for axis, most in limits])


def _at_most(builder: Builder, dim: Dim, most: int) -> ir.Value:
    seen = builder.elementwise("LessOrEqual", [builder.shape([dim]), builder.constant([most])])
    return builder.reshape(seen, [])


def cache_layout(spec: AttentionSpec, kv_heads: Axis, columns: Axis, channels: Axis) -> Axes:
    """The layout of a cache that operators take: batch, heads, positions, channels."""
    return spec.axes.b, kv_heads, columns, channels


def with_zeros(builder: Builder, value: ir.Value) -> ir.Value:
    """Keys or values (b, t, n·h) with zeros after the last position."""
    dims, dtype = dims_of(builder, value), builder.facts.dtype(value)
    zeros = builder.expand(builder.scalar(0.0, dtype), [dims[0], 1, *dims[2:]])
    return builder.node("Concat", [value, zeros], {"axis": 1})


def with_sink(builder: Builder, bias: ir.Value | None, sink: IndexedValue, axes: Axes4, dtype: ir.DataType) -> ir.Value:
    """A bias of shape (b or 1, n or 1, s, t), or none, with the sink after its last column."""
    sink = sink.refined()
    present = {leaf for axis in sink.axes for leaf in axis}
    layout: Axes = (*(axis if present & set(leaves(axis)) else () for axis in (axes.b, axes.n, axes.i)), ())
    column = builder.cast(arrange(builder, sink, layout), dtype)
    dims = builder.facts.dims(bias)
    batch = length(axes.b) if layout[0] or (dims is not None and dims[0] != 1) else 1
    rows, columns = length(axes.i), length(axes.j)
    whole = [batch, length(axes.n), rows]
    if bias is None:
        bias = builder.scalar(0.0, dtype)
    bias = builder.expand(bias, [*whole, columns], [True] * 4)
    column = builder.expand(column, [*whole, 1], [True, True, True, False])
    return builder.node("Concat", [bias, column], {"axis": 3})


_RESCALE, _ROTATE, _DECOMPOSED = 10.0, 10.0, 50.0
"""Prices of multiplying a tensor by a number, of rotating it by one operator, and by decomposed ones, on the scale of
`attention.axes.rearrange.cost`.
"""


def arranged(builder: Builder, source: Source, target: Axes, dtype: ir.DataType, empty: IndexedValue | None = None) -> ir.Value:
    """An operand in the layout and type of the operator; a rotated one is 0 in the rows where `empty` holds.

    It is rotated with the heads it has, before they are repeated.

    Raises:
        Refused: It is of no type that could be converted, or runs over an axis that the layout has not.
    """
    indexed = source.indexed
    if source.rotary is not None:
        present = factors_of(source.rotary).union(*refined(indexed.axes))
        layout = tuple(tuple(leaf for leaf in axis if leaf in present) for axis in refined(target))
        value = arrange(builder, indexed, layout)
        if dtype == ir.DataType.FLOAT:
            value = typed(builder, value, dtype)
        indexed = IndexedValue(rotated(builder, value, source.rotary, layout, empty), layout)
    return typed(builder, arrange(builder, indexed, target), dtype)


def prepared_query(builder: Builder, source: Source, target: Axes, spec: AttentionSpec, rows: Rows, scale: float) -> ir.Value:
    """The queries in the layout of the operator, (b, s, n·h), times every scale that is no plain number; level rows are zero.

    They get the sign of the scale that is a number, too: flash kernels look for the largest product before they scale it, so that
    a negative scale overflows there, and makes +inf of -inf; an operator takes 0 for its default.
    """
    assert spec.dtype is not None
    axes, rotary, level = spec.axes, source.rotary, rows.zero_query
    is_rotated = level is not None and rotary is not None and rows.by_tables and can_empty(rotary, level, axes.b, axes.i)
    query = arranged(builder, source, target, spec.dtype, level if is_rotated else None)
    for value in spec.scale_values:
        query = scale_rows(builder, query, axes.h, value, axes)
    if scale <= 0.0:
        query = builder.elementwise("Mul", [query, builder.scalar(-1.0 if scale else 0.0, spec.dtype)])
    if level is not None and not is_rotated:
        query = apply_rows(builder, query, axes.h, Refill(level, True, keeps_nan=rows.keeps_nan), axes)
    return query


def cheapest(operand: tuple[Source, ...], target: Axes) -> Source:
    """The source that costs least to bring into the target layout; of equals the one furthest up, so that views die."""
    rotary = operand[-1].rotary
    plain = rotary is not None and not takes(rotary, target)
    usable = [source for source in operand if source.rotary is None] if plain else operand
    return min(reversed(usable), key=lambda source: price(operand, source, target))


def price(operand: tuple[Source, ...], source: Source, target: Axes) -> float:
    """The price of using `source`: rearranging it, and keeping its producers alive, unless that is needed anyway."""
    price, furthest = cost(source.indexed, target), operand[-1]
    if source.rotary is not None:
        price += _ROTATE
    if source is furthest or _is_needed(source):
        return price
    rescaled = _RESCALE if source.factor != furthest.factor else 0.0
    return price + rescaled + cost(furthest.indexed, source.indexed.axes) + _rotating(operand, source)


def _is_needed(source: Source) -> bool:
    """Whether a value is looked at elsewhere too."""
    value = source.indexed.value
    return value.is_graph_output() or len(viewers(value)) > 1


def _rotating(operand: tuple[Source, ...], source: Source) -> float:
    """The price of keeping the rotation of `source` alive."""
    rotary = operand[-1].rotary
    between = itertools.dropwhile(lambda item: item is not source, operand)
    if rotary is None or source.rotary is not None or any(item.rotary is None and _is_needed(item) for item in between):
        return 0.0
    return _DECOMPOSED if rotary.is_decomposed else _ROTATE


def replaces_rotation(spec: AttentionSpec) -> bool:
    """Whether the operands of an operator that knows grouped heads would be rotated by RotaryEmbedding, and are not yet."""
    heads, axes = shared_heads(spec), spec.axes
    targets: tuple[Axes, Axes] = (axes.b, axes.i, (*axes.n, *axes.h)), (axes.b, axes.j, (*heads, *axes.h))
    chosen = [cheapest(operand, target) for operand, target in zip((spec.query, spec.key), targets, strict=True)]
    return any(source.rotary is not None and source.rotary.is_decomposed for source in chosen)


def typed(builder: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A float value as `dtype`.

    Raises:
        Refused: It is no float that the operators know.
    """
    known = builder.facts.dtype(value)
    if known is None or known == dtype:
        return value
    if known not in FLOATS_TO_32:
        raise Refused("mixed-types", f"'{value.name}' is {type_name(known)} where the queries are {type_name(dtype)}")
    return builder.cast(value, dtype)


def scale_of(spec: AttentionSpec, chosen: Sequence[Source]) -> float:
    """The number that an operator multiplies scores with, of queries and keys from these sources."""
    return spec.scale * chosen[0].factor * chosen[1].factor


@dataclasses.dataclass(frozen=True)
class Operands:
    """Queries, keys and values as an operator takes them."""

    values: tuple[ir.Value, ir.Value, ir.Value]
    chosen: Sequence[Source]
    """The sources they were taken from."""
    targets: tuple[Axes, Axes, Axes]
    scale: float
    kv_heads: Axis = ()
    """The heads of keys and values, where the operator knows grouped ones."""
    past: tuple[ir.Value | None, ir.Value | None] = (None, None)
    """Keys and values of earlier positions as (b, n, p, h), where the operator is to append to them."""
    rotary: Rotary | None = None
    """How the operator is to rotate queries and keys."""
    bias: ir.Value | None = None
    """The bias that the operator adds to them, (2·n·h + n·v,)."""
    frontier: tuple[ir.Value, ...] = ()
    """Their operand, where that is above `chosen`."""
    needless: tuple[ir.Value, ...] = ()
    """Values between that and the attention."""


def grouped(
    builder: Builder, spec: AttentionSpec, rows: Rows, *, cached: bool = False, absorbs: Callable[[Rotary], bool] | None = None
) -> Operands:
    """Brings the operands of `spec` into the layout of operators that know grouped heads.

    Args:
        builder: The builder.
        spec: The attention.
        rows: The corrections of its rows.
        cached: The operator appends keys and values to earlier ones itself.
        absorbs: Whether the operator can rotate queries and keys itself, if it ever does.

    Raises:
        Refused: One of them cannot be brought there.
    """
    assert spec.dtype is not None
    axes, shared = spec.axes, shared_heads(spec)
    cache = spec.cache if cached else None
    columns = axes.j if cache is None else cache.new_axis
    operands = spec.operands() if cache is None else (spec.query, *cache.new)
    targets: tuple[Axes, Axes, Axes] = (
        (axes.b, axes.i, (*axes.n, *axes.h)),
        (axes.b, columns, (*shared, *axes.h)),
        (axes.b, columns, (*shared, *axes.v)),
    )
    chosen = [cheapest(operand, target) for operand, target in zip(operands, targets, strict=True)]
    turn, other = chosen[0].rotary, chosen[1].rotary
    rotary = turn if turn and other and is_same(turn, other) and absorbs is not None and absorbs(turn) else None
    if rotary is not None:
        chosen[:2] = [dataclasses.replace(source, rotary=None) for source in chosen[:2]]
    scale = scale_of(spec, chosen)
    query = prepared_query(builder, chosen[0], targets[0], spec, rows, scale)
    key, value = (arranged(builder, source, target, spec.dtype) for source, target in zip(chosen[1:], targets[1:], strict=True))
    earlier = (None, None) if cache is None else past(builder, spec, cache, shared)
    return Operands((query, key, value), chosen, targets, scale, shared, earlier, rotary)


def shared_heads(spec: AttentionSpec) -> Axis:
    """The heads of keys and values: those they have where each serves several adjacent queries, else all.

    One for all queries is an axis without a factor, of length 1.
    """
    heads = spec.axes.n
    present = [{leaf for axis in operand[-1].indexed.axes for leaf in leaves(axis)} for operand in (spec.key, spec.value)]
    own, other = (tuple(leaf for leaf in heads if leaf in found) for found in present)
    return own if own == other == heads[: len(own)] and isinstance(length(own), int) else heads


def operator(
    builder: Builder,
    spec: AttentionSpec,
    info: OpInfo,
    inputs: Mapping[str, ir.Value | None],
    attributes: Mapping[str, Any],
    outputs: int = 1,
) -> ir.Value:
    """The first output of the operator that takes the place of `spec`, (b, i, n·v); inputs go by their names."""
    axes = spec.axes
    for value in inputs.values():
        _write_widths(builder, value)
    return builder.node(
        info.name,
        info.arranged(inputs),
        attributes,
        domain=info.domain,
        dims=[length(axes.b), length(axes.i), length((*axes.n, *axes.v))],
        dtype=spec.dtype,
        hint=f"{spec.name}/{info.name}",
        outputs=outputs,
    )


def _write_widths(builder: Builder, value: ir.Value | None) -> None:
    """Writes down the lengths that are known of an operand: ONNX infers operators' shapes from those of queries and values."""
    if value is None or value.producer() is None or value.shape is not None or value.is_graph_output():
        return
    dims, dtype = builder.facts.dims(value), builder.facts.dtype(value)
    if dims is not None and dtype is not None:
        value.type = value.type or ir.TensorType(dtype)
        value.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in dims])


def replacing(
    builder: Builder,
    fused: ir.Value,
    spec: AttentionSpec,
    rows: Rows,
    chosen: Sequence[Source],
    targets: Sequence[Axes],
    mask: str,
    *,
    cached: bool = False,
    layout: Axes | None = None,
) -> Emitted:
    """The operator's output of shape (b, s, n·v) as the result that it replaces.

    Args:
        builder: The builder.
        fused: The output.
        spec: The attention.
        rows: The corrections of its rows.
        chosen: The sources that query, key and value were taken from.
        targets: The layouts they were brought into.
        mask: The form in which the mask is passed.
        cached: The operator gives keys and values with those of earlier positions too.
        layout: The layout of the output where it is another one; no row of it is corrected then.
    """
    axes, node = spec.axes, producer_of(fused)
    laid = layout or (axes.b, axes.i, (*axes.n, *axes.v))
    assert spec.dtype is not None
    result = IndexedValue(_finished(builder, fused, spec, rows, chosen[2].factor, axes), laid)
    end = min(reversed(spec.output), key=lambda indexed: cost(result, indexed.axes))
    final = typed(builder, arrange(builder, result, end.axes), spec.output_dtype or spec.dtype)
    names = axes.names() if spec.cache is None else axes.names() | named("l", (spec.cache.new_axis,))
    query, key, value = (einops(source.indexed, target, names) for source, target in zip(chosen, targets, strict=True))
    layouts = Layouts(query, key, value, einops(result, end.axes, names))
    kept = presents(builder, spec, spec.cache, shared_heads(spec), node) if cached and spec.cache is not None else ()
    return Emitted(end.value, final, node, layouts, mask, scale_of(spec, chosen), presents=kept, assumes=rows.assumes)


def _finished(builder: Builder, result: ir.Value, spec: AttentionSpec, rows: Rows, factor: float, axes: Axes4) -> ir.Value:
    """The result times its own scales and factor, rows that become a number filled."""
    for value in spec.result_scales:
        result = scale_rows(builder, result, axes.v, value, axes)
    for refill in rows.refills:
        result = apply_rows(builder, result, axes.v, refill, axes)
    if factor != 1.0:
        result = builder.elementwise("Mul", [result, builder.scalar(factor, spec.dtype)])
    return result
