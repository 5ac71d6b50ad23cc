"""Shapes of products, convolutions and fused attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given
from onnx_attnfuse.graph.facts_view import Dims, Known, broadcast
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.rules.reading import ShapeRule, einsum_terms, input_dims, rules
from onnx_attnfuse.graph.sizes import Dim


def _matmul(node: ir.Node, facts: Known, second: int = 1) -> Sequence[Dims | None]:
    left, right = input_dims(node, 0, facts), input_dims(node, second, facts)
    if not left or not right:
        return [None]
    return _product(_turned(node, "A", left), _turned(node, "B", right), facts)


def _quantised(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Two tensors of quantised numbers, each with its scale and zero point after it."""
    return _matmul(node, facts, 3)


def _product(left: Dims, right: Dims, facts: Known) -> Sequence[Dims | None]:
    facts.contract(left[-1], *right[-2:][:1])
    if len(left) == 1 or len(right) == 1:
        return [(*left[:-1], *right[:-2], *(right[-1:] if len(right) > 1 else ()))]
    leading = broadcast([left[:-2], right[:-2]], facts, exactly=True)
    return [None if leading is None else (*leading, left[-2], right[-1])]


def _turned(node: ir.Node, side: str, dims: Dims) -> Dims:
    """The shape of an operand as it is multiplied: FusedMatMul moves its first axis after the batch, then turns the matrices."""
    if attribute(node, f"transBatch{side}"):
        dims = (*dims[1:-1], dims[0], dims[-1])
    return (*dims[:-2], dims[-1], dims[-2]) if attribute(node, f"trans{side}") else dims


def _einsum(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    terms = einsum_terms(node, facts)
    if terms is None:
        return [None]
    lengths: dict[str, Dim] = {}
    for index, term in enumerate(terms[0]):
        dims = input_dims(node, index, facts)
        for letter, dim in zip(term, dims or (), strict=False):
            other = lengths.setdefault(letter, dim)
            facts.meet(other, dim)
            facts.spread(other, dim)
            facts.spread(dim, other)
            lengths[letter] = sizes.broadcast((other, dim))
    return [tuple(lengths.get(letter, facts.fresh(node.outputs[0], axis)) for axis, letter in enumerate(terms[1]))]


def _conv(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    data, weight = input_dims(node, 0, facts), input_dims(node, 1, facts)
    output = node.outputs[0]
    if data is None:
        return [None]
    if weight is None:
        return [(data[0], *(facts.fresh(output, axis) for axis in range(1, len(data))))]
    facts.contract(data[1], weight[1] * attribute(node, "group", 1))
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return [(data[0], weight[0], *(facts.fresh(output, axis) for axis in range(2, len(data))))]
    return [(data[0], weight[0], *_positions(node, data[2:], weight[2:]))]


def _positions(node: ir.Node, data: Dims, kernel: Dims) -> list[Dim]:
    """The number of places a kernel of lengths `kernel` is put at, along each spatial axis."""
    count = len(data)
    strides, dilations, _, pads = _placing(node, count)
    reach = [(length - 1) * dilation for length, dilation in zip(kernel, dilations, strict=True)]
    free = [data[axis] + (pads[axis] + pads[axis + count] - 1) - reach[axis] for axis in range(count)]
    return [sizes.floor_quotient(length, stride) + 1 for length, stride in zip(free, strides, strict=True)]


def _conv_transpose(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    data, weight = input_dims(node, 0, facts), input_dims(node, 1, facts)
    if data is None:
        return [None]
    if weight is None:
        return [(data[0], *(facts.fresh(node.outputs[0], axis) for axis in range(1, len(data))))]
    facts.contract(data[1], weight[0])
    return [(data[0], weight[1] * attribute(node, "group", 1), *(_spread(node, data[2:], weight[2:], facts)))]


def _spread(node: ir.Node, data: Dims, kernel: Dims, facts: Known) -> list[Dim]:
    """The lengths over which a kernel of lengths `kernel` spreads each element."""
    count = len(data)
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or "output_shape" in node.attributes:
        return [facts.fresh(node.outputs[0], axis + 2) for axis in range(count)]
    strides, dilations, more, pads = _placing(node, count)
    ends = [(length - 1) * dilation + 1 for length, dilation in zip(kernel, dilations, strict=True)]
    cut = [more[axis] - pads[axis] - pads[axis + count] for axis in range(count)]
    return [(data[axis] - 1) * strides[axis] + ends[axis] + cut[axis] for axis in range(count)]


def _placing(node: ir.Node, count: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Strides, dilations, what is added at the end, and pads of a kernel."""
    wanted = {"strides": [1] * count, "dilations": [1] * count, "output_padding": [0] * count, "pads": [0] * 2 * count}
    strides, dilations, more, pads = (list(attribute(node, name, default)) for name, default in wanted.items())
    return strides, dilations, more, pads


def _pool(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    data, kernel = input_dims(node, 0, facts), attribute(node, "kernel_shape")
    if data is None:
        return [None]
    if kernel is None:
        return [(*data[:2], *[1] * (len(data) - 2))]
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or attribute(node, "ceil_mode", 0):
        return [(*data[:2], *(facts.fresh(node.outputs[0], axis) for axis in range(2, len(data))))]
    return [(*data[:2], *_positions(node, data[2:], tuple(kernel)))]


def _attention(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    query, value = input_dims(node, 0, facts), input_dims(node, 2, facts)
    if node.domain == CONTRIB:
        return _projected_attention(node, facts)
    if query is None or value is None:
        return []
    _meet_operands(query, input_dims(node, 1, facts), value, facts)
    _meet_mask(node, 3, 4, query, facts)
    if len(query) == 4:
        return [(*query[:3], value[-1])]
    heads: Any = attribute(node, "q_num_heads", 1)
    each = sizes.exact_quotient(value[-1], attribute(node, "kv_num_heads", 1))
    return [(*query[:2], facts.fresh(node.outputs[0], 2) if each is None else each * heads)]


def _projected_attention(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    tokens, weights = input_dims(node, 0, facts), input_dims(node, 1, facts)
    if tokens is None or len(tokens) != 3:
        return []
    given: list[int] = attribute(node, "qkv_hidden_sizes", [])
    width = given[2] if given else None if weights is None else sizes.exact_quotient(weights[-1], 3)
    return [(*tokens[:2], facts.fresh(node.outputs[0], 2) if width is None else width)]


def contrib_attention(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """The shape of an attention of com.microsoft of queries (b, s, n·h); heads that share values are as wide in both."""
    query, value = input_dims(node, 0, facts), input_dims(node, 2, facts)
    if query is not None and len(query) == 3 and given(node, 2) is None and attribute(node, "kv_num_heads"):
        return [(*query[:2], _width_of_packed(node, query[-1], facts))]
    if query is None or value is None or len(query) != 3 or len(value) not in {3, 4}:
        return []
    if node.op_type == "MultiHeadAttention":
        _meet_operands(query, input_dims(node, 1, facts), value, facts)
        _meet_mask(node, 5, 6, query, facts)
    return [(*query[:2], value[-1] if len(value) == 3 and not attribute(node, "kv_num_heads") else query[-1])]


def _width_of_packed(node: ir.Node, total: Dim, facts: Known) -> Dim:
    """The channels of all query heads, where those of keys and values follow them in one tensor."""
    heads, kv_heads = int(attribute(node, "num_heads", 1)), int(attribute(node, "kv_num_heads", 1))
    size = sizes.exact_quotient(total, heads + 2 * kv_heads)
    return facts.fresh(node.outputs[0], 2) if size is None else size * heads


def _meet_operands(query: Dims, key: Dims | None, value: Dims, facts: Known) -> None:
    """Notes that there are as many keys as values, and one batch; an operand without a batch has 1 entry."""
    if key is not None and len(key) == len(value):
        facts.enforce(key[-2], value[-2])
    for other in (key, value):
        if other is not None and other[0] != 1:
            facts.enforce(other[0], query[0])


def _meet_mask(node: ir.Node, mask: int, past: int, query: Dims, facts: Known) -> None:
    """Notes that the last axes of a mask are as long as there are rows and keys, the past's with them; others may be 1."""
    given, key, earlier = (input_dims(node, place, facts) for place in (mask, 1, past))
    if given is None or key is None or not 2 <= len(given) <= 4:
        return
    facts.meet(given[-2], query[-2])
    facts.meet(given[-1], key[2 if len(key) == 4 else 1] + (earlier[2] if earlier is not None and len(earlier) == 4 else 0))
    heads = query[1] if len(query) == 4 else attribute(node, "q_num_heads") or attribute(node, "num_heads")
    for dim, size in zip(given[:-2], (query[0], heads)[4 - len(given) :], strict=True):
        if size is not None:
            facts.meet(dim, size)
            facts.spread(dim, size)


PRODUCTS: dict[str, ShapeRule] = {
    **rules("DynamicQuantizeMatMul FusedGemm FusedMatMul FusedMatMulActivation Gemm GemmFastGelu", _matmul),
    **rules("MatMul MatMulInteger MatMulInteger16 MatMulIntegerToFloat TransposeMatMul", _matmul),
    **rules("QGemm QLinearMatMul", _quantised),
    **rules("Conv ConvInteger FusedConv", _conv),
    **rules("MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool", _pool),
    "Attention": _attention,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "QAttention": _projected_attention,
}
