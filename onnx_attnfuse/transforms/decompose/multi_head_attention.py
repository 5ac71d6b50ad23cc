"""com.microsoft.MultiHeadAttention, spelled out."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.decompose.core import spell
from onnx_attnfuse.transforms.decompose.padding import attention_inputs
from onnx_attnfuse.transforms.decompose.pieces import BY_HEAD, joined, merge_heads, split_heads
from onnx_attnfuse.transforms.decompose.site import Answer, Site


def spelled(site: Site) -> Answer:
    """The output, both presents and the scores.

    Raises:
        Refused: It cannot be spelled out exactly.
    """
    build, heads, dtype = site.build, site.count("num_heads"), site.dtype()
    query, key, value = _operands(site, heads)
    rows, fresh = dims_of(build, query)[2], dims_of(build, key)[2]
    if site.attribute("unidirectional", 0) and rows not in {1, fresh}:
        raise Refused("kernels-disagree", f"kernels disagree on the triangle of {rows} queries and {fresh} keys", site.node.name)
    past = site.all_given("past_key", "past_value")
    if past:
        key, value = (joined(build, [old, new], 2) for old, new in zip(past, (key, value), strict=True))
    problem = attention_inputs(site, (query, key, value), heads, site.given("key_padding_mask"))
    found = spell(build, problem)
    frontier = [*site.all_given("query", "key", "value", "bias"), *past]
    return Answer((merge_heads(build, found.result), key, value, build.cast(found.masked, dtype)), tuple(frontier))


def _operands(site: Site, heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """All three as (b, n, s, h), with the biases of their projections.

    Raises:
        Refused: They have none of the documented forms.
    """
    build, query, bias = site.build, site.operand("query"), site.given("bias")
    rank = len(site.dims(query))
    if rank == 5:
        if bias is not None:
            raise Refused("not-spelled", "a bias of packed operands is not spelled out", site.node.name)
        query, key, value = _unpacked(site, query, 3)
        return query, key, value
    if rank != 3:
        raise Refused("malformed", f"queries of {rank} axes", site.node.name)
    width = site.number(site.dims(query)[2], "the width of the queries")
    query = split_heads(build, _biased(site, query, bias, 0, width), heads, site.share(width, heads, "the head size"))
    key = site.operand("key")
    if len(site.dims(key)) == 5:
        key, value = _unpacked(site, key, 2)
        return query, key, value
    value = site.operand("value")
    if len(site.dims(key)) == 4:  # who computed these once for all queries has added the biases
        return query, key, value
    inner = site.number(site.dims(value)[2], "the width of the values")
    key = _biased(site, key, bias, width, width)
    value = _biased(site, value, bias, 2 * width, inner)
    size, v_size = site.share(width, heads, "the head size"), site.share(inner, heads, "the head size of the values")
    return query, split_heads(build, key, heads, size), split_heads(build, value, heads, v_size)


def _biased(site: Site, value: ir.Value, bias: ir.Value | None, start: int, width: int) -> ir.Value:
    """An operand plus its part of the biases."""
    if bias is None:
        return value
    part = site.build.slice(bias, 0, start, start + width)
    return site.build.elementwise("Add", [value, part], site.build.facts.dtype(value))


def _unpacked(site: Site, packed: ir.Value, parts: int) -> list[ir.Value]:
    """(b, s, n, parts, h) as `parts` of (b, n, s, h)."""
    build, (batch, length, heads, _, size) = site.build, site.dims(packed)
    found = [build.reshape(build.slice(packed, 3, part, part + 1), (batch, length, heads, size)) for part in range(parts)]
    return [build.transpose(item, BY_HEAD) for item in found]
