"""Normalizations of queries and keys taken into GroupQueryAttention, where lengths follow from shapes.

A cache in one buffer has it done before the whole decoder is judged (`fusion.shared_cache.share`).
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import lengths_follow_from_shapes, same_node
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.targets.norms_inside import EPSILON, before_norms

_INFO = group_query_attention.INFO


@enabling(
    "normalizations of queries and keys moved into GroupQueryAttention", "com.microsoft.GroupQueryAttention", "norms-inside"
)
def with_norms_inside(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention that normalizes each head of queries and keys itself."""
    found = before_norms(node, builder) if lengths_follow_from_shapes(node) else None
    if found is None:
        return None
    pairs = same_node(node, found.inputs, {**attributes(node), EPSILON: found.epsilon}, builder)
    others = [_INFO.input(node, name) for name in ("value", "past_key", "past_value")]
    return EnablingChange(pairs, (*found.sources, *(value for value in others if value is not None)))
