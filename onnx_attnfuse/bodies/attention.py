"""com.microsoft.Attention, decomposed: the projection, then the computation of MultiHeadAttention."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.bodies.core import decompose, integer, joined, merge_heads, split_heads
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.bodies.padding import attention_inputs
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.reasons import Refused


def body(fused: FusedNode) -> Body:
    """The output, and keys and values as (2, b, n, t, h).

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    build, heads, dtype = fused.build, fused.count("num_heads"), fused.dtype()
    query, key, value = _projected(fused, heads, dtype)
    past = fused.given("past")
    if past is not None:
        earlier = [_half(fused, past, place) for place in (0, 1)]
        key, value = (joined(build, [old, new], 2) for old, new in zip(earlier, (key, value), strict=True))
    problem = attention_inputs(fused, (query, key, value), heads, _mask(fused), starts=True)
    result = merge_heads(build, decompose(build, problem).result)
    frontier = fused.all_given("input", "weights", "bias", "past")
    return Body((result, _stacked(fused, key, value)), tuple(frontier))


def _mask(fused: FusedNode) -> ir.Value | None:
    """The mask; one of (b, 1) or (1, 1) means none."""
    mask = fused.given("mask_index")
    dims = None if mask is None else fused.dims(mask)
    return None if dims is not None and len(dims) == 2 and dims[1] == 1 else mask


def _projected(fused: FusedNode, heads: int, dtype: ir.DataType) -> list[ir.Value]:
    """Queries, keys and values as (b, n, s, h)."""
    build, tokens, weights, bias = fused.build, fused.operand("input"), fused.operand("weights"), fused.given("bias")
    if len(fused.dims(tokens)) != 3 or len(fused.dims(weights)) != 2:
        raise Refused("malformed", "the input has three axes, the weights have two", fused.node.name)
    width = fused.number(fused.dims(weights)[1], "the width of the projection")
    dims = (*fused.dims(tokens)[:2], width)
    product = build.node("MatMul", [tokens, weights], dims=dims, dtype=dtype)
    product = product if bias is None else build.elementwise("Add", [product, bias], dtype)
    sizes: list[int] = fused.attribute("qkv_hidden_sizes") or [width // 3] * 3
    ends = [sum(sizes[: place + 1]) for place in range(3)]
    parts = [build.slice(product, 2, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [split_heads(build, part, heads, size // heads) for part, size in zip(parts, sizes, strict=True)]


def _half(fused: FusedNode, past: ir.Value, place: int) -> ir.Value:
    """Keys or values of (2, b, n, p, h)."""
    build = fused.build
    return build.node("Gather", [past, integer(build, place)], {"axis": 0}, dims=fused.dims(past)[1:], dtype=fused.dtype())


def _stacked(fused: FusedNode, key: ir.Value, value: ir.Value) -> ir.Value | None:
    """Keys and values as one; None where their sizes differ."""
    build = fused.build
    if dims_of(build, key) != dims_of(build, value):
        return None
    return joined(build, [build.reshape(item, (1, *dims_of(build, item))) for item in (key, value)], 0)
