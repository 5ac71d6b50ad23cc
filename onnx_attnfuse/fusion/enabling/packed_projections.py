"""Queries, keys and values as one product, which GroupQueryAttention takes as one tensor.

    x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── GroupQueryAttention
    x ── MatMul(Wq | Wk | Wv) ── GroupQueryAttention

Where a Split would have to cut the product again, as in front of other operators and in gated MLPs, prompts lose by it
(docs/decisions/0025).
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.uses import producer_of, reads_input
from onnx_attnfuse.kernels.operators import group_query_attention, info_of
from onnx_attnfuse.targets.merged_products import merged
from onnx_attnfuse.targets.packed_operands import products_of

GROUPED = group_query_attention.INFO
_OPERANDS = 3
"""Queries, keys and values, its first inputs."""


def with_packed_projections(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention with queries, keys and values as one product, where lengths follow from shapes."""
    facts = builder.facts
    lengths = [GROUPED.first(node, role) for role in ("last", "total")] if info_of(node) is GROUPED else [None]
    if any(value is None or reads_input(value) for value in lengths):
        return None
    products = products_of(node, builder)
    if products is None:
        return None
    whole = merged(products, builder, node.name or "")
    fused = builder.node(
        node.op_type,
        [whole, None, None, *node.inputs[_OPERANDS:]],
        attributes(node),
        domain=CONTRIB,
        hint=node.name,
        outputs=len(node.outputs),
    )
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for old, new in zip(node.outputs, producer_of(fused).outputs, strict=True):
        facts.copy(old, new)
        new.type, new.shape = old.type, old.shape
        pairs += [(old, new)] if old.uses() or old.is_graph_output() else []
    frontier = dict.fromkeys([products[0].input, *(value for item in products for value in item.constants())])
    past = [GROUPED.input(node, name) for name in ("past_key", "past_value")]
    return EnablingChange(tuple(pairs), (*frontier, *(value for value in past if value is not None)))
