"""com.microsoft.PagedAttention, decomposed: tokens of several requests one after the other, keys and values in pages.

A token is of the first request that ends after it. New keys are written to their slots. Then those of each request are gathered,
and its queries padded to the longest. Pages hold whatever the memory held, and a weight of 0 does not remove NaN. So in the place
of positions that a request does not have its last one is read, which no row sees.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import (
    INTEGER,
    AttentionInputs,
    arithmetic,
    column,
    compared,
    decompose,
    integer,
    length_of,
    merge_heads,
    places,
    split_heads,
)
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused


@dataclasses.dataclass(frozen=True)
class Packed:
    """Where the tokens of a step are."""

    past: ir.Value
    """(b): the cached positions of each request."""
    starts: ir.Value
    """(b): its first token."""
    new: ir.Value
    """(b): the number of its tokens."""
    request: ir.Value
    """(t): the request of each token."""
    place: ir.Value
    """(t): its place among the new ones of its request."""
    position: ir.Value
    """(t): its position in its request."""


def packed(build: Builder, cumulative: ir.Value, past: ir.Value, tokens: Dim) -> Packed:
    """Emits where tokens are.

    Args:
        build: The builder.
        cumulative: Where requests begin and the last ends, (b + 1).
        past: The cached positions of each request, (b).
        tokens: The number of tokens.
    """
    batch, bounds = dims_of(build, past)[0], build.cast(cumulative, INTEGER)
    starts, ends = (
        build.node(
            "Slice", [bounds, build.constant([first]), build.constant([last]), build.constant([0])], dims=[batch], dtype=INTEGER
        )
        for first, last in ((0, -1), (1, np.iinfo(np.int64).max))
    )
    past, index = build.cast(past, INTEGER), places(build, tokens)
    ended = build.cast(compared(build, "GreaterOrEqual", column(build, index), ends), INTEGER)
    request = build.reduce("ReduceSum", ended, [1], keep=False)
    place = arithmetic(build, "Sub", index, _of(build, starts, request))
    position = arithmetic(build, "Add", place, _of(build, past, request))
    return Packed(past, starts, arithmetic(build, "Sub", ends, starts), request, place, position)


def _plus(build: Builder, value: ir.Value, number: int) -> ir.Value:
    return arithmetic(build, "Add", value, integer(build, number))


def _counting(build: Builder, count: ir.Value) -> ir.Value:
    """0, 1, ... up to a number, (1)."""
    return build.node("Range", [integer(build, 0), build.reshape(count, ()), integer(build, 1)])


def _of(build: Builder, value: ir.Value, index: ir.Value) -> ir.Value:
    """The elements (t) of one for each request at those of tokens."""
    return build.node("Gather", [value, index], {"axis": 0}, dims=build.facts.dims(index), dtype=INTEGER)


def body(fused: FusedNode) -> Body:
    """The output and both caches.

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    build, dtype, heads, kv_heads = fused.build, fused.dtype(), fused.count("num_heads"), fused.count("kv_num_heads")
    caches = [fused.operand(name) for name in ("key_cache", "value_cache")]
    query, *new = _operands(fused, heads, kv_heads)
    tokens, size = fused.dims(query)[0], fused.share(fused.dims(query)[1], heads, "the head size")
    past = fused.operand("past_seqlens")
    at = packed(build, fused.operand("cumulative_sequence_length"), past, tokens)
    batch, (blocks, block, *_) = fused.dims(past)[0], fused.dims(caches[0])
    table = build.elementwise("Max", [build.cast(fused.operand("block_table"), INTEGER), integer(build, 0)], INTEGER)
    within, length = length_of(build, block), arithmetic(build, "Add", at.past, at.new)
    page = _nd(build, table, [at.request, arithmetic(build, "Div", at.position, within)], [tokens], INTEGER)
    slots = _joined(build, [page, arithmetic(build, "Mod", at.position, within)], tokens)
    reached, row = (_counting(build, build.reduce("ReduceMax", item, [0])) for item in (length, at.new))
    (reach,), (rows,) = dims_of(build, reached), dims_of(build, row)
    last = arithmetic(build, "Max", _plus(build, column(build, length), -1), integer(build, 0))
    read = arithmetic(build, "Min", reached, last)
    index = {"axis": 1}
    page = build.node(
        "GatherElements", [table, arithmetic(build, "Div", read, within)], index, dims=(batch, reach), dtype=INTEGER
    )
    read = arithmetic(build, "Add", arithmetic(build, "Mul", page, within), arithmetic(build, "Mod", read, within))
    presents, keys = list[ir.Value](), list[ir.Value]()
    for cache, item in zip(caches, new, strict=True):
        part, dims = build.reshape(item, (tokens, kv_heads, size)), (blocks, block, kv_heads, size)
        presents.append(build.node("ScatterND", [cache, slots, part], dims=dims, dtype=dtype))
        flat = build.reshape(presents[-1], (blocks * block, kv_heads * size))
        found = build.node("Gather", [flat, read], {"axis": 0}, dims=(batch, reach, kv_heads * size), dtype=dtype)
        keys.append(split_heads(build, found, kv_heads, size))
    end = _plus(build, length_of(build, tokens), -1)
    chosen = arithmetic(build, "Min", arithmetic(build, "Add", column(build, at.starts), row), end)
    padded = build.node("Gather", [query, chosen], {"axis": 0}, dims=(batch, rows, heads * size), dtype=dtype)
    seen = _seen(fused, arithmetic(build, "Add", column(build, at.past), row), reached, (batch, 1, rows, reach))
    problem = AttentionInputs(
        split_heads(build, padded, heads, size), keys[0], keys[1], dtype, heads, size,
        scale=fused.attribute("scale"), softcap=fused.attribute("softcap", 0.0), seen=seen, sink=fused.given("head_sink"),
    )  # fmt: skip
    result = merge_heads(build, decompose(build, problem).result)
    result = _nd(build, result, [at.request, at.place], [tokens, heads * size], dtype)
    return Body((result, *presents), tuple(fused.all_given("query", "key", "value", "key_cache", "value_cache")))


def _operands(fused: FusedNode, heads: int, kv_heads: int) -> list[ir.Value]:
    """Queries, keys and values, (t, n·h) each."""
    build, query = fused.build, fused.operand("query")
    if fused.given("key") is not None:
        return [query, fused.operand("key"), fused.operand("value")]
    size = fused.share(fused.dims(query)[1], heads + 2 * kv_heads, "the head size")
    ends = [heads * size, (heads + kv_heads) * size, (heads + 2 * kv_heads) * size]
    return [build.slice(query, 1, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _seen(fused: FusedNode, position: ir.Value, reached: ir.Value, dims: tuple[Dim, ...]) -> ir.Value:
    """(b, 1, s, t): the positions that a row sees, up to its own and within the window."""
    build, window = fused.build, fused.attribute("local_window_size", -1)
    if window != -1 and window < 1:
        raise Refused("not-decomposed", f"local_window_size {window} cannot be decomposed", fused.node.name)
    row = build.reshape(position, (*dims[:3], 1))
    seen = compared(build, "LessOrEqual", reached, row)
    if window == -1:
        return seen
    since = compared(build, "Greater", reached, arithmetic(build, "Sub", row, integer(build, window)))
    return build.chained("And", [seen, since])


def _joined(build: Builder, parts: list[ir.Value], count: Dim) -> ir.Value:
    """Indices (t) side by side."""
    columns = [column(build, part) for part in parts]
    return build.node("Concat", columns, {"axis": 1}, dims=(count, len(parts)), dtype=INTEGER)


def _nd(build: Builder, data: ir.Value, index: list[ir.Value], dims: list[Dim], dtype: ir.DataType) -> ir.Value:
    """The parts of a value at two indices for each token."""
    return build.node("GatherND", [data, _joined(build, index, dims[0])], dims=dims, dtype=dtype)


def put_in_place(builder: Builder, node: ir.Node) -> None:
    """Puts operators of the standard in the place of PagedAttention."""
    builder.at(node)
    count = len(builder.added)
    fused = FusedNode(node, builder, tuple(node.inputs))
    found = body(fused)
    fused.finish()
    for item in builder.added[count:]:
        item.metadata_props.update(node.metadata_props)
    for old, value in zip(node.outputs, found.values, strict=True):
        assert value is not None
        value.shape, value.type = old.shape, old.type
        name, old.name = old.name, None
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        if value.is_graph_output():
            value.name = name
    builder.graph.remove(node, safe=True)
