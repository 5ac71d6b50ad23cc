"""Attention over tokens without padding, and the moves of tokens from their places and back.

Tokens of all entries come one after the other. Each sees those of its own entry; one after the last entry sees none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import (
    INTEGER,
    TRUTH,
    AttentionInputs,
    arithmetic,
    by_entry,
    column,
    compared,
    decompose,
    integer,
    joined,
    length_of,
    merge_heads,
    places,
    split_heads,
)
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_INT32 = ir.DataType.INT32


def attention(fused: FusedNode) -> Body:
    """PackedAttention: queries, keys and values are parts of one product."""
    build, weights = fused.build, fused.operand("weights")
    width = fused.number(fused.dims(weights)[1], "the width of the projection")
    dims = (*fused.dims(fused.operand("input"))[:1], width)
    product = build.node("MatMul", [fused.operand("input"), weights], dims=dims, dtype=fused.dtype())
    product = build.elementwise("Add", [product, fused.operand("bias")], fused.dtype())
    sizes: list[int] = fused.attribute("qkv_hidden_sizes") or [width // 3] * 3
    ends = np.cumsum(sizes).tolist()
    return _within_entries(fused, [build.slice(product, 1, end - size, end) for size, end in zip(sizes, ends, strict=True)])


def multi_head_attention(fused: FusedNode) -> Body:
    """PackedMultiHeadAttention: (tokens, n·h) each, or all three as (tokens, n, 3, h), and the biases of their projections.

    Raises:
        Refused: Keys or values are missing.
    """
    build, query, bias = fused.build, fused.operand("query"), fused.given("bias")
    fused.attribute("mask_filter_value")  # for padding, of which nothing is left
    if len(fused.dims(query)) == 4:
        tokens, heads, _, size = fused.dims(query)
        parts = [build.reshape(build.slice(query, 2, place, place + 1), (tokens, heads * size)) for place in range(3)]
    else:
        parts = [fused.operand(name) for name in ("query", "key", "value")]
    if bias is not None:
        ends = np.cumsum([fused.number(fused.dims(part)[1], "the width of an operand") for part in parts]).tolist()
        biases = [build.slice(bias, 0, start, end) for start, end in zip([0, *ends], ends, strict=False)]
        parts = [build.elementwise("Add", list(pair), fused.dtype()) for pair in zip(parts, biases, strict=True)]
    return _within_entries(fused, parts)


def _within_entries(fused: FusedNode, parts: list[ir.Value]) -> Body:
    """The attention of (tokens, n·h) each, with every entry padded; a token after the last entry gives NaN."""
    build, heads, dtype = fused.build, fused.count("num_heads"), fused.dtype()
    tokens, (batch, length) = fused.dims(parts[0])[0], fused.dims(fused.operand("token_offset"))
    starts = build.cast(fused.operand("cumulative_sequence_length"), INTEGER)
    begins, ends = build.slice(starts, 0, 0, batch), build.slice(starts, 0, 1, batch + 1)
    index = column(build, places(build, tokens))
    ended = build.cast(compared(build, "GreaterOrEqual", index, ends), INTEGER)
    entry = build.reduce("ReduceSum", ended, [1], keep=False)  # as many end before a token
    skipped = arithmetic(build, "Sub", length_of(build, length), arithmetic(build, "Sub", ends, begins))
    skipped = joined(
        build, [build.constant([0]), build.node("CumSum", [skipped, integer(build, 0)], dims=[batch], dtype=INTEGER)], 0
    )
    place = build.node("Gather", [skipped, entry], {"axis": 0}, dims=[tokens], dtype=INTEGER)
    place = arithmetic(build, "Min", arithmetic(build, "Add", places(build, tokens), place), length_of(build, batch * length))
    widths = [fused.share(fused.dims(part)[1], heads, "the head size") for part in parts]
    padded = [build.slice(_scattered(fused, part, place, batch * length + 1), 0, 0, batch * length) for part in parts]
    operands = [
        split_heads(build, build.reshape(part, (batch, length, width * heads)), heads, width)
        for part, width in zip(padded, widths, strict=True)
    ]
    seen = compared(build, "Less", places(build, length), by_entry(build, arithmetic(build, "Sub", ends, begins)))
    problem = AttentionInputs(
        operands[0], operands[1], operands[2], dtype, heads, widths[0], fused.attribute("scale"),
        added=tuple(fused.all_given("attention_bias")), seen=seen,
    )  # fmt: skip
    width = heads * widths[2]
    rows = build.reshape(merge_heads(build, decompose(build, problem).result), (batch * length, width))
    rows = joined(build, [rows, build.constant(np.full((1, width), np.nan, dtype.numpy()))], 0)
    return Body((_rows(fused, rows, place),), tuple(parts))


def _scattered(fused: FusedNode, tokens: ir.Value, place: ir.Value, length: Dim) -> ir.Value:
    """Tokens (t, d) at their places among so many, and 0 elsewhere."""
    build, dtype, dims = fused.build, fused.dtype(), (length, fused.dims(tokens)[1])
    zeros = build.expand(build.reshape(build.scalar(0.0, dtype), (1, 1)), dims, [True, True])
    return build.node("ScatterND", [zeros, column(build, place), tokens], dims=dims, dtype=dtype)


def remove_padding(fused: FusedNode) -> Body:
    """The tokens, their places in (b·s) with those of padding after them, where entries start, and the length of the longest."""
    build, padded = fused.build, fused.operand("input")
    batch, length, width = fused.dims(padded)
    counts = build.reshape(build.cast(fused.operand("sequence_token_count"), INTEGER), (batch,))
    kept = compared(build, "Less", places(build, length), column(build, counts))
    kept = build.reshape(kept, (batch * length,))
    found, rest = (_places(fused, item) for item in (kept, build.elementwise("Not", [kept], TRUTH)))
    tokens = _rows(fused, build.reshape(padded, (batch * length, width)), found)
    order = build.node("Concat", [found, rest], {"axis": 0}, dims=(batch * length,), dtype=INTEGER)
    ends = build.node("CumSum", [counts, integer(build, 0)], dims=(batch,), dtype=INTEGER)
    starts = joined(build, [build.constant([0]), ends], 0)
    longest = build.reduce("ReduceMax", joined(build, [counts, build.constant([0])], 0), [0])
    others = (build.cast(item, _INT32) for item in (build.reshape(order, (batch, length)), starts, longest))
    return Body((tokens, *others), (padded,))


def _rows(fused: FusedNode, table: ir.Value, places: ir.Value) -> ir.Value:
    """Rows of a table; none has the width too, which ONNX's evaluator of 1.19 loses."""
    build, dtype = fused.build, fused.build.facts.dtype(table)
    width = fused.number(fused.dims(table)[-1], "the width of a row")
    found = build.node("Gather", [table, places], {"axis": 0}, dtype=dtype)
    return build.node("Reshape", [found, build.constant([-1, width])], dtype=dtype)


def _places(fused: FusedNode, kept: ir.Value) -> ir.Value:
    """Where truth values hold."""
    found = fused.build.node("NonZero", [kept], dtype=INTEGER)
    return fused.build.node("Reshape", [found, fused.build.constant([-1])], dtype=INTEGER)


def restore_padding(fused: FusedNode) -> Body:
    """Tokens at their places, and 0 elsewhere."""
    build, tokens, offsets = fused.build, fused.operand("input"), fused.operand("token_offset")
    (count, width), (batch, length) = fused.dims(tokens), fused.dims(offsets)
    place = build.slice(build.reshape(build.cast(offsets, INTEGER), (batch * length,)), 0, 0, count)
    return Body((build.reshape(_scattered(fused, tokens, place, batch * length), (batch, length, width)),), (tokens,))


def product(fused: FusedNode) -> Body:
    """FusedMatMul: a product, scaled, of operands whose matrices are transposed on request; batches that move are refused.

    Raises:
        Refused: An operand is a vector.
    """
    build, sides = fused.build, [fused.operand("A"), fused.operand("B")]
    for place, name in enumerate(("transA", "transB")):
        rank = len(fused.dims(sides[place]))
        if rank < 2:
            raise Refused("malformed", "an operand is no matrix", fused.node.name)
        if fused.attribute(name, 0):
            sides[place] = build.transpose(sides[place], (*range(rank - 2), rank - 1, rank - 2))
    found = build.node("MatMul", sides, dtype=fused.dtype())
    alpha = fused.attribute("alpha", 1.0)
    scaled = build.node("Mul", [found, build.scalar(alpha, fused.dtype())], dtype=fused.dtype())
    return Body((found if alpha == 1 else scaled,), tuple(sides))
