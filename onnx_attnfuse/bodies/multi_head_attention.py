"""com.microsoft.MultiHeadAttention, decomposed."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.bodies.core import BY_HEAD, decompose, joined, merge_heads, split_heads
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.bodies.padding import attention_inputs
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.reasons import Refused


def body(fused: FusedNode) -> Body:
    """The output, both presents and the scores.

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    build, heads, dtype = fused.build, fused.count("num_heads"), fused.dtype()
    query, key, value = _operands(fused, heads)
    rows, fresh = dims_of(build, query)[2], dims_of(build, key)[2]
    if fused.attribute("unidirectional", 0) and rows not in {1, fresh}:
        raise Refused("kernels-disagree", f"kernels disagree on the triangle of {rows} queries and {fresh} keys", fused.node.name)
    past = fused.all_given("past_key", "past_value")
    if past and len(fused.node.outputs) < 3:
        raise Refused("kernels-disagree", "kernels disagree on a past without presents", fused.node.name)
    if past:
        key, value = (joined(build, [old, new], 2) for old, new in zip(past, (key, value), strict=True))
    problem = attention_inputs(fused, (query, key, value), heads, fused.given("key_padding_mask"))
    found = decompose(build, problem)
    frontier = [*fused.all_given("query", "key", "value", "bias"), *past]
    return Body((merge_heads(build, found.result), key, value, build.cast(found.masked, dtype)), tuple(frontier))


def _operands(fused: FusedNode, heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """All three as (b, n, s, h), with the biases of their projections.

    Raises:
        Refused: They have none of the documented forms.
    """
    build, query, bias = fused.build, fused.operand("query"), fused.given("bias")
    rank = len(fused.dims(query))
    if rank == 5:
        if bias is not None:
            raise Refused("not-decomposed", "a bias of packed operands cannot be decomposed", fused.node.name)
        query, key, value = _unpacked(fused, query, 3)
        return query, key, value
    if rank != 3:
        raise Refused("malformed", f"queries of {rank} axes", fused.node.name)
    width = fused.number(fused.dims(query)[2], "the width of the queries")
    query = split_heads(build, _biased(fused, query, bias, 0, width), heads, fused.share(width, heads, "the head size"))
    key = fused.operand("key")
    if len(fused.dims(key)) == 5:
        key, value = _unpacked(fused, key, 2)
        return query, key, value
    value = fused.operand("value")
    if len(fused.dims(key)) == 4:  # who computed these once for all queries has added the biases
        return query, key, value
    inner = fused.number(fused.dims(value)[2], "the width of the values")
    key = _biased(fused, key, bias, width, width)
    value = _biased(fused, value, bias, 2 * width, inner)
    size, v_size = fused.share(width, heads, "the head size"), fused.share(inner, heads, "the head size of the values")
    return query, split_heads(build, key, heads, size), split_heads(build, value, heads, v_size)


def _biased(fused: FusedNode, value: ir.Value, bias: ir.Value | None, start: int, width: int) -> ir.Value:
    """An operand plus its part of the biases."""
    if bias is None:
        return value
    part = fused.build.slice(bias, 0, start, start + width)
    return fused.build.elementwise("Add", [value, part], fused.build.facts.dtype(value))


def _unpacked(fused: FusedNode, packed: ir.Value, parts: int) -> list[ir.Value]:
    """(b, s, n, parts, h) as `parts` of (b, n, s, h)."""
    build, (batch, length, heads, _, size) = fused.build, fused.dims(packed)
    found = [build.reshape(build.slice(packed, 3, part, part + 1), (batch, length, heads, size)) for part in range(parts)]
    return [build.transpose(item, BY_HEAD) for item in found]
