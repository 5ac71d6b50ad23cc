"""com.microsoft.GroupQueryAttention, decomposed.

Where lengths are those of the shapes, new keys are appended by Concat, as exporters do. Where entries have lengths of their own,
every place of the present is looked up: in the past, among the new keys, or in a zero after both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import (
    AttentionInputs,
    arithmetic,
    before,
    by_entry,
    chosen,
    compared,
    decompose,
    integer,
    length_of,
    merge_heads,
    moved,
    over_root,
    places,
    split_heads,
)
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.bodies.kv_append import Cache, cache_of
from onnx_attnfuse.bodies.rotary_embedding import looked_up, rotated
from onnx_attnfuse.bodies.window_cache import WindowCache
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.graph.dtypes import largest, widened
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_HALF_BYTE = 4
PRIVATE = "onnx_attnfuse"
"""The domain of what references alone compute: how a cache is quantised."""


def body(fused: FusedNode) -> Body:
    """The output and both presents; rows after the length of their entry are left open, as the operator leaves them.

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    build, dtype, added = fused.build, fused.dtype(), fused.given("attention_bias")
    query, key, value = _operands(fused)
    query, key = (_normalized(fused, item, f"{name}_norm_weight") for item, name in ((query, "q"), (key, "k")))
    if len(fused.all_given("q_norm_weight", "k_norm_weight")) == 1:
        raise Refused("malformed", "weights of normalization are for queries and keys, or for neither", fused.node.name)
    _, heads, rows, size = dims_of(build, query)
    if dims_of(build, key)[2] == 0:
        raise Refused("not-decomposed", "attention to a buffer without new keys cannot be decomposed", fused.node.name)
    cache = _cache(fused, rows)
    if fused.attribute("do_rotary", 0):
        query, key = (_turned(fused, item, cache) for item in (query, key))
    scales = [_scale(fused, item, name) for item, name in ((key, "k"), (value, "v"))]
    stored = [_stored(fused, item, scale) for item, scale in zip((key, value), scales, strict=True)]
    held = _held(fused, cache, stored)
    presents, (key, value) = held.presents, held.read
    key, value = (_read(fused, item, scale, size) for item, scale in zip((key, value), scales, strict=True))
    problem = AttentionInputs(
        query,
        key,
        value,
        dtype,
        fused.number(heads, "the number of heads"),
        fused.number(size, "the head size"),
        scale=fused.attribute("scale"),
        softcap=fused.attribute("softcap", 0.0),
        added=() if added is None else (added,),
        seen=held.seen,
        sink=_sink(fused),
        empty_is_zero=added is not None,
    )
    result = merge_heads(build, decompose(build, problem).result)
    operands = fused.all_given(
        "query", "key", "value", "past_key", "past_value", "cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight"
    )
    possible = [cache.rows_defined(), None if added is None else _has_a_key(fused, added, problem.seen)]
    row_tests = [item for item in possible if item is not None]
    defined = (build.chained("And", row_tests) if row_tests else None, *[held.defined] * 2)
    return Body((result, *presents), tuple(operands), defined, () if added is None else (added,))


@dataclasses.dataclass(frozen=True)
class _Held:
    """Keys and values after an append."""

    presents: list[ir.Value]
    read: list[ir.Value]
    """Those that the attention reads."""
    seen: ir.Value | None
    """Which of them each row sees; None: all."""
    defined: ir.Value | None
    """The positions of the presents that hold something; None: all."""


def _held(fused: FusedNode, cache: Cache, stored: list[ir.Value]) -> _Held:
    """Keys and values after new ones were appended.

    Raises:
        Refused: They are in a buffer of no more than a window, and it is not known what that holds.
    """
    build, added = fused.build, fused.given("attention_bias")
    if not fused.attribute("sliding_window_cache", 0):
        presents = cache.appended(stored)
        read = presents if added is None else [cache.cut(item) for item in presents]
        seen = _seen(fused, cache, dims_of(build, read[0])[2])
        return _Held(presents, read, seen, cache.keys_defined(presents[0]))
    window: int = fused.attribute("local_window_size", -1)
    if window < 1 or added is not None or cache.starts is None or cache.ends is None or not fused.attribute("causal", 1):
        what = "a cache of no more than a window needs one, a past, and lengths, and no bias"
        raise Refused("not-decomposed", what, fused.node.name)
    windowed = WindowCache(cache, cache.starts, cache.ends, window)
    everything = windowed.everything(stored)
    return _Held([windowed.kept(item) for item in everything], everything, windowed.seen(), windowed.keys_defined())


def _has_a_key(fused: FusedNode, added: ir.Value, seen: ir.Value | None) -> ir.Value:
    """(b, s, 1): the rows whose bias leaves them a key; of others one kernel gives 0, another NaN or the mean of the values.

    Raises:
        Refused: The number of axes of the bias is unknown.
    """
    build, dtype = fused.build, ir.DataType.FLOAT
    lowest = -largest(fused.dtype())
    bias = build.cast(added, dtype)
    bias = bias if seen is None else chosen(build, seen, bias, build.scalar(lowest, dtype))
    worst = build.reduce("ReduceMin", build.reduce("ReduceMax", bias, [3]), [1, 3], keep=False)
    found = compared(build, "Greater", worst, build.scalar(lowest / 2, dtype))
    return build.reshape(found, (*dims_of(build, found), 1))


def _scale(fused: FusedNode, value: ir.Value, name: str) -> ir.Value | None:
    """The scales of a quantised cache, which nothing but a reference computes; one, or one for each channel of each head."""
    if not fused.quantises:
        return None
    scale, kind = fused.given(f"{name}_scale"), fused.attribute(f"{name}_quant_type", "NONE")
    _, heads, _, size = dims_of(fused.build, value)
    count = 0 if scale is None else sizes.product(fused.dims(scale))
    wanted = {"NONE": 0, "PER_TENSOR": 1, "PER_CHANNEL": heads * size}.get(kind)
    if count != wanted:
        raise Refused("malformed", f"{count} scales, and {kind} needs {wanted}", fused.node.name)
    return None if scale is None else fused.build.reshape(scale, (1, 1, 1, 1) if count == 1 else (1, heads, 1, size))


def _stored(fused: FusedNode, value: ir.Value, scale: ir.Value | None) -> ir.Value:
    """Keys or values as a cache holds them."""
    if scale is None:
        return value
    build, bits, past = fused.build, fused.attribute("kv_cache_bit_width", 0), fused.given("past_key")
    plain = ir.DataType.UINT8 if bits == _HALF_BYTE else ir.DataType.INT8
    dtype = plain if past is None else build.facts.dtype(past) or plain
    *dims, size = dims_of(build, value)
    width = sizes.floor_quotient(size + 1, 2) if bits == _HALF_BYTE else size
    kept = {"bits": bits, "to": int(dtype)}
    return build.node("QuantiseCache", [value, scale], kept, domain=PRIVATE, dims=[*dims, width], dtype=dtype)


def _read(fused: FusedNode, present: ir.Value, scale: ir.Value | None, size: Dim) -> ir.Value:
    """Keys or values as attention reads them from a cache."""
    if scale is None:
        return present
    build, bits = fused.build, fused.attribute("kv_cache_bit_width", 0)
    dims = (*dims_of(build, present)[:3], size)
    kept = {"bits": bits, "to": int(build.facts.dtype(present) or ir.DataType.INT8), "size": size}
    return build.node("DequantiseCache", [present, scale], kept, domain=PRIVATE, dims=dims, dtype=fused.dtype())


def rehearsals(fused: FusedNode) -> Iterator[FusedNode]:
    """Sites with the same operator, whose lengths and positions fit its sizes where its own inputs could be anything.

    Entries end where the past and the new positions do, in a prompt where these do, or where a longer buffer does; the first at
    the very end, others before it. Positions count up from there: in a prompt ONNX Runtime's CPU kernel reads but the first.
    """
    rows = dims_of(fused.build, _operands(fused)[0])[2]
    cache = _cache(fused, rows)
    if cache.ends is not None:
        yield from (_counted(_lengthened(fused, total, least, cache.ends, rows), rows) for total, least in _longest(fused, cache))
    elif fused.given("position_ids") is not None:
        yield _counted(fused, rows)


def _longest(fused: FusedNode, cache: Cache) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Lengths that the longest entry may have, and the least that another may have beside it."""
    build, count = fused.build, length_of(fused.build, cache.rows)
    yield count, integer(build, 1)
    added = fused.given("attention_bias")
    if added is not None:
        yield length_of(build, fused.dims(added)[-1]), count
    elif cache.past:
        earlier = length_of(build, fused.dims(cache.past[0])[2])
        yield arithmetic(build, "Add", earlier, count), count
        yield arithmetic(build, "Max", earlier, count), count


def _lengthened(fused: FusedNode, total: ir.Value, least: ir.Value, ends: ir.Value, rows: Dim) -> FusedNode:
    """The operator with entries of lengths between two numbers."""
    build, one = fused.build, integer(fused.build, 1)
    spread = arithmetic(build, "Add", arithmetic(build, "Sub", total, least), one)
    shorter = arithmetic(build, "Mod", places(build, dims_of(build, ends)[0]), spread)
    last = arithmetic(build, "Sub", arithmetic(build, "Sub", total, one), shorter)
    if fused.given("query_seqlens") is not None:
        end, count = arithmetic(build, "Add", last, one), length_of(build, rows)
        fused = fused.replacing(query_seqlens=build.cast(arithmetic(build, "Min", end, count), ir.DataType.INT32))
    last, total = (build.cast(item, ir.DataType.INT32) for item in (last, total))
    return fused.replacing(seqlens_k=last, total_sequence_length=total)


def _counted(fused: FusedNode, rows: Dim) -> FusedNode:
    """The operator with the positions that it would take by itself, if it is given any."""
    build, given = fused.build, fused.given("position_ids")
    if given is None:
        return fused
    positions = _cache(fused, rows).positions()
    wanted = fused.dims(fused.operand("query"))[0], rows
    return fused.replacing(position_ids=build.expand(positions, wanted, [True, False]))


def _cache(fused: FusedNode, rows: Dim) -> Cache:
    past = tuple(fused.all_given("past_key", "past_value"))
    counts = fused.given("query_seqlens")
    if counts is not None and not past:
        raise Refused("malformed", "rows are counted beside earlier keys and values alone", fused.node.name)
    return cache_of(fused, past, rows, fused.operand("seqlens_k"), fused.operand("total_sequence_length"), counts)


def _operands(fused: FusedNode) -> list[ir.Value]:
    """Queries (b, n, s, h), keys and values (b, m, s, h)."""
    build, heads, kv_heads, query = fused.build, fused.count("num_heads"), fused.count("kv_num_heads"), fused.operand("query")
    counts = (heads, kv_heads, kv_heads)
    if heads % kv_heads:
        raise Refused("malformed", f"{kv_heads} heads of keys for {heads} of queries", fused.node.name)
    if fused.given("key") is None:
        size = fused.share(fused.dims(query)[2], heads + 2 * kv_heads, "the head size")
        ends = np.cumsum(counts) * size
        parts = [build.slice(query, 2, int(end) - count * size, int(end)) for count, end in zip(counts, ends, strict=True)]
    else:
        size = fused.share(fused.dims(query)[2], heads, "the head size")
        parts = [fused.operand(name) for name in ("query", "key", "value")]
    return [split_heads(build, part, count, size) for part, count in zip(parts, counts, strict=True)]


def _normalized(fused: FusedNode, value: ir.Value, weight: str) -> ir.Value:
    """Queries or keys, each head over its root mean square, if there are weights for that."""
    factors, epsilon = fused.given(weight), fused.attribute("qk_norm_epsilon", 1e-6)
    if factors is None:
        return value
    return fused.build.elementwise("Mul", [over_root(fused.build, value, fused.dtype(), [3], epsilon), factors], fused.dtype())


def _turned(fused: FusedNode, value: ir.Value, cache: Cache) -> ir.Value:
    """Queries or keys, rotated."""
    build, tables = fused.build, (fused.operand("cos_cache"), fused.operand("sin_cache"))
    given = fused.given("position_ids")
    positions = cache.positions() if given is None else given
    found: list[ir.Value] = []
    for table in tables:
        part = looked_up(fused, table, positions)
        *batch, length, half = dims_of(build, part)
        found.append(build.reshape(part, (*(batch or [1]), 1, length, half)))
    half = fused.number(fused.dims(tables[0])[1], "the number of cosines of a position")
    return rotated(build, value, found[0], found[1], half, interleaved=bool(fused.attribute("rotary_interleaved", 0)))


def _seen(fused: FusedNode, cache: Cache, columns: Dim) -> ir.Value | None:
    """True for the keys that a row sees; None: it sees all."""
    build, window, causal = fused.build, fused.attribute("local_window_size", -1), fused.attribute("causal", 1)
    if window != -1 and (window < 1 or not causal):
        raise Refused("not-decomposed", f"local_window_size {window} with causal {causal} cannot be decomposed", fused.node.name)
    if not causal:
        return None if cache.ends is None else compared(build, "Less", places(build, columns), by_entry(build, cache.ends))
    offset = cache.offset()
    seen = before(build, cache.rows, columns, offset)
    if window == -1:
        return seen
    since = before(build, cache.rows, columns, moved(build, offset, -window), opposite=True)
    return build.chained("And", [seen, since])


def _sink(fused: FusedNode) -> ir.Value | None:
    """The sinks of the heads; zeros where the softmax is smooth."""
    sink, heads = fused.given("head_sink"), fused.count("num_heads")
    if sink is None and fused.attribute("smooth_softmax", -1) == 1:
        return fused.build.constant(np.zeros(heads, widened(fused.dtype()).numpy()))
    return sink
