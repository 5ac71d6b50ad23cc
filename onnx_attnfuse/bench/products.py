"""The operations of a node's products: twice the multiplications of MatMul, Gemm, Conv, Einsum and attention.

Elementwise work (bias, softmax, normalization) is not counted: it can be done while data is on its way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, has_unknown_attribute
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_attention, is_contrib, is_standard
from onnx_attnfuse.graph.rules.reading import einsum_terms
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.op_node import params_of_node

PAST = 3
"""The place of the earlier keys among the inputs of GroupQueryAttention."""
_LOOKS_LIKE_ONE = re.compile("Attention|Conv|Einsum|GRU|Gemm|LSTM|MatMul|MoE|RNN")


class Unknown(Exception):
    """A size is not known, or the operator is not one that is counted."""


class Shapes:
    """The shapes of a graph's values as numbers."""

    def __init__(self, facts: Facts, lengths: Mapping[str, int]) -> None:
        self.facts = facts
        self.lengths = lengths

    def of(self, value: ir.Value | None) -> tuple[int, ...]:
        """The shape of a value.

        Raises:
            Unknown: It is not known.
        """
        dims = self.facts.dims(value)
        if dims is None:
            raise Unknown
        try:
            return tuple(sizes.evaluate(dim, self.lengths) for dim in dims)
        except KeyError:
            raise Unknown from None

    def count(self, value: ir.Value | None) -> int:
        """How many elements a value has; raises as `of`."""
        return math.prod(self.of(value))


def shares_cache(node: ir.Node, shapes: Shapes) -> bool:
    """Whether the caches that an attention gives are as long as those it takes: one buffer, of which any part may be in use."""
    if node.op_type != "GroupQueryAttention" or len(node.inputs) <= PAST or node.inputs[PAST] is None or len(node.outputs) < 2:
        return False
    try:
        return shapes.of(node.inputs[PAST])[2] == shapes.of(node.outputs[1])[2] and shapes.of(node.inputs[0])[1] > 0
    except Unknown:
        return False


def has_products(node: ir.Node) -> bool:
    """Whether most of the work of a node is multiplying matrices."""
    return bool(_LOOKS_LIKE_ONE.search(node.op_type))


def operations(node: ir.Node, shapes: Shapes) -> int:
    """The operations of a node's products; 0 for what has none.

    Raises:
        Unknown: They cannot be counted.
    """
    if not has_products(node):
        return 0
    count = _attention if is_attention(node) else _COUNTED.get(node.op_type)
    if count is None or has_unknown_attribute(node) or not (is_standard(node) or is_contrib(node)):
        raise Unknown
    try:
        return 2 * count(node, shapes)
    except (LookupError, TypeError, ValueError):  # operands that no operator takes, as only an invalid model has
        raise Unknown from None


def _matmul(node: ir.Node, shapes: Shapes) -> int:
    left = shapes.of(node.inputs[0])
    turned = 0 if attribute(node, "transBatchA", 0) else len(left) - 2
    return shapes.count(node.outputs[0]) * left[turned if attribute(node, "transA", 0) else -1]


def _gemm(node: ir.Node, shapes: Shapes) -> int:
    left = shapes.of(node.inputs[0])
    return shapes.count(node.outputs[0]) * left[0 if attribute(node, "transA", 0) else 1]


def _few_bits(node: ir.Node, shapes: Shapes) -> int:
    """MatMulNBits: every element of the operand with each of the N columns."""
    return shapes.count(node.inputs[0]) * int(attribute(node, "N", 0))


def _conv(node: ir.Node, shapes: Shapes) -> int:
    weight = shapes.of(node.inputs[1])
    return shapes.count(node.outputs[0]) * math.prod(weight[1:])


def _conv_transpose(node: ir.Node, shapes: Shapes) -> int:
    weight = shapes.of(node.inputs[1])
    return shapes.count(node.inputs[0]) * math.prod(weight[1:])


def _einsum(node: ir.Node, shapes: Shapes) -> int:
    terms = einsum_terms(node, shapes.facts)
    if len(node.inputs) == 1:
        return 0
    if terms is None or len(node.inputs) != 2:
        raise Unknown
    lengths: dict[str, int] = {}
    for term, value in zip(terms[0], node.inputs, strict=True):
        for letter, length in zip(term, shapes.of(value), strict=True):
            lengths[letter] = max(length, lengths.get(letter, 1))
    return math.prod(lengths.values())


_COUNTED: Mapping[str, Callable[[ir.Node, Shapes], int]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "FusedConv": _conv,
    "FusedMatMul": _matmul,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MatMulNBits": _few_bits,
}
"""Multiplications by operator."""


def _attention(node: ir.Node, shapes: Shapes) -> int:
    """Two products for every pair of a query and a key that attributes leave; a mask that is an input saves nothing."""
    params = params_of_node(node, shapes.facts)
    if not isinstance(params, AttentionParams):
        raise Unknown
    params = params.with_lengths(shapes.lengths)
    batch, rows, columns, size, v_size = params.batch, params.rows, params.columns, params.head_size, params.v_head_size
    if not (
        isinstance(batch, int)
        and isinstance(rows, int)
        and isinstance(columns, int)
        and isinstance(size, int)
        and isinstance(v_size, int)
    ):
        raise Unknown
    if shares_cache(node, shapes):
        columns = rows
    pairs = _pairs(rows, columns, params, int(attribute(node, "local_window_size", -1)))
    inside = 0
    if is_contrib(node, "Attention"):
        inside = shapes.count(node.inputs[0]) * shapes.of(node.inputs[1])[-1]
    return batch * params.heads * pairs * (size + v_size) + inside


def _pairs(rows: int, columns: int, params: AttentionParams, window: int) -> int:
    """The pairs of a query and a key of one head."""
    if not params.causal:
        return rows * columns
    earlier = columns - rows if params.cached else 0
    widest = columns if window <= 0 else min(columns, window)
    return sum(min(widest, earlier + row + 1) for row in range(rows))
