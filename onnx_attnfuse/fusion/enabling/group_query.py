"""Nodes before GroupQueryAttention taken into it, where lengths follow from shapes."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import lengths_follow_from_shapes, same_node
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.targets.packed_operands import merged, products_of
from onnx_attnfuse.targets.rms_norm import EPSILON, before_norms

_INFO = group_query_attention.INFO
_OPERANDS = 3
"""Queries, keys and values, its first inputs."""


@enabling(
    "normalizations of queries and keys moved into GroupQueryAttention", "com.microsoft.GroupQueryAttention", "norms-inside"
)
def with_norms_inside(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention that normalizes each head of queries and keys itself.

    A cache in one buffer has it done before the whole decoder is judged (`fusion.shared_cache.share`).
    """
    found = before_norms(node, builder) if lengths_follow_from_shapes(node) else None
    if found is None:
        return None
    pairs = same_node(node, found.inputs, {**attributes(node), EPSILON: found.epsilon}, builder)
    others = [_INFO.input(node, name) for name in ("value", "past_key", "past_value")]
    return EnablingChange(pairs, (*found.sources, *(value for value in others if value is not None)))


@enabling(
    "projections of queries, keys and values merged for GroupQueryAttention",
    "com.microsoft.GroupQueryAttention",
    "merged-projections",
)
def with_packed_projections(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention with queries, keys and values as one product, where lengths follow from shapes.

        x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── GroupQueryAttention
        x ── MatMul(Wq | Wk | Wv) ── GroupQueryAttention

    Where a Split would have to cut the product again, as in front of other operators and in gated MLPs, prompts lose by it
    (docs/decisions/0025).
    """
    products = products_of(node, builder) if lengths_follow_from_shapes(node) else None
    if products is None:
        return None
    whole = merged(products, builder, node.name or "")
    pairs = same_node(node, [whole, None, None, *node.inputs[_OPERANDS:]], attributes(node), builder)
    frontier = dict.fromkeys([products[0].input, *(value for item in products for value in item.constants())])
    past = [_INFO.input(node, name) for name in ("past_key", "past_value")]
    return EnablingChange(pairs, (*frontier, *(value for value in past if value is not None)))
