"""LinearAttention: a state of keys by values that fades, takes up each token, and is read by its query."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.bodies.core import joined, merge_heads, repeat_heads, split_heads
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_MOST_TOKENS = 64
_BY_ROW = (0, 1, 3, 2)


def body(fused: FusedNode) -> Body:
    """The tokens one after the other.

    Raises:
        Refused: How many tokens there are is unknown, or there are more heads of queries than of values.
    """
    build, value = fused.build, fused.operand("value")
    heads, groups, rule = fused.count("kv_num_heads"), fused.count("q_num_heads"), fused.attribute("update_rule", "gated_delta")
    fused.attribute("chunk_size", 64)
    batch, length, width = fused.dims(value)
    count, v = fused.number(length, "the number of tokens"), fused.share(width, heads, "the size of values")
    k = fused.share(fused.dims(fused.operand("query"))[-1], groups, "the size of queries")
    if heads % groups or count > _MOST_TOKENS or rule not in {"linear", "gated", "delta", "gated_delta"}:
        raise Refused("not-decomposed", "more heads of queries than of values, many tokens, or another rule", fused.node.name)
    query, key = (_by_head(fused, name, k, heads) for name in ("query", "key"))
    values = split_heads(build, value, heads, v)
    decay = _by_head_or_key(fused, fused.given("decay"), heads, k) if rule in {"gated", "gated_delta"} else None
    beta = _by_head_or_key(fused, fused.given("beta"), heads, k) if "delta" in rule else None
    scale, state = fused.attribute("scale", 0.0) or 1 / math.sqrt(k), _first(fused, (batch, heads, k, v))
    results: list[ir.Value] = []
    for now in range(count):
        q_row, k_row, row, fading, rate = (
            None if item is None else item if count == 1 else build.slice(item, 2, now, now + 1)
            for item in (query, key, values, decay, beta)
        )
        assert q_row is not None
        assert k_row is not None
        assert row is not None
        if fading is not None:
            grown = build.node("Exp", [fading], dims=dims_of(build, fading), dtype=fused.dtype())
            state = _op(build, "Mul", state, build.transpose(grown, _BY_ROW))
        if "delta" in rule:
            row = _op(build, "Sub", row, _product(build, k_row, state))
        row = row if rate is None else _op(build, "Mul", row, rate)
        state = _op(build, "Add", state, _op(build, "Mul", build.transpose(k_row, _BY_ROW), row))
        read = _product(build, q_row, state)
        results.append(read if scale == 1 else _op(build, "Mul", read, build.scalar(scale, fused.dtype())))
    output = merge_heads(build, results[0] if count == 1 else joined(build, results, 2))
    return Body((output, state), tuple(fused.all_given("query", "key", "value", "past_state", "decay", "beta")))


def _op(build: Builder, op: str, left: ir.Value, right: ir.Value) -> ir.Value:
    return build.elementwise(op, [left, right], build.facts.dtype(left))


def _product(build: Builder, row: ir.Value, state: ir.Value) -> ir.Value:
    dims = (*dims_of(build, row)[:-1], dims_of(build, state)[-1])
    return build.node("MatMul", [row, state], dims=dims, dtype=build.facts.dtype(row))


def _by_head(fused: FusedNode, name: str, size: int, heads: int) -> ir.Value:
    """Queries or keys as (b, n, t, k), each head as often as it serves a head of values."""
    given = fused.operand(name)
    count = fused.number(fused.dims(given)[-1], f"the width of {name}") // size
    if not count or heads % count:
        raise Refused("not-decomposed", f"{count} heads of {name} for {heads} of values", fused.node.name)
    return repeat_heads(fused.build, split_heads(fused.build, given, count, size), heads)


def _by_head_or_key(fused: FusedNode, value: ir.Value | None, heads: int, size: int) -> ir.Value | None:
    """Decays or rates as (b, n, t, 1), or (b, n, t, k) where each channel of a key has its own."""
    if value is None:
        return None
    width = fused.dims(value)[-1]
    if width not in {1, heads, heads * size}:
        raise Refused("malformed", f"{width} decays or rates for {heads} heads of {size}", fused.node.name)
    return split_heads(fused.build, value, 1 if width == 1 else heads, size if width == heads * size else 1)


def _first(fused: FusedNode, dims: tuple[Dim, int, int, int]) -> ir.Value:
    """The state before the first token, zeros where none is given."""
    past = fused.given("past_state")
    if past is not None:
        fused.take_equal(fused.dims(past), dims, "the state")
        return past
    zero = fused.build.reshape(fused.build.scalar(0.0, fused.dtype()), (1, 1, 1, 1))
    return fused.build.expand(zero, dims, [True] * 4)
