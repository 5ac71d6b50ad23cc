"""The fused operators that have a body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from onnx_attnfuse.bodies import (
    attention,
    bias_split_gelu,
    causal_conv_with_state,
    group_query_attention,
    linear_attention,
    multi_head_attention,
    norms,
    onnx_attention,
    packed,
    rotary_embedding,
    unfold_tensor,
)
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.ops import CONTRIB, plain_domain

BODIES: Mapping[tuple[str, str], Callable[[FusedNode], Body]] = {
    ("", "Attention"): onnx_attention.body,
    ("", "RotaryEmbedding"): rotary_embedding.body,
    (CONTRIB, "Attention"): attention.body,
    (CONTRIB, "BiasSplitGelu"): bias_split_gelu.body,
    (CONTRIB, "BranchwiseRMSNorm"): norms.branchwise_rms,
    (CONTRIB, "CausalConvWithState"): causal_conv_with_state.body,
    (CONTRIB, "GroupQueryAttention"): group_query_attention.body,
    (CONTRIB, "LinearAttention"): linear_attention.body,
    (CONTRIB, "MultiHeadAttention"): multi_head_attention.body,
    (CONTRIB, "RotaryEmbedding"): rotary_embedding.body,
    (CONTRIB, "UnfoldTensor"): unfold_tensor.body,
}
"""Bodies by domain, empty for the standard's, and name."""
NORMS: Mapping[tuple[str, str], Callable[[FusedNode], Body]] = {
    ("", "GroupNormalization"): norms.group,
    ("", "RMSNormalization"): norms.rms,
    (CONTRIB, "SkipLayerNormalization"): norms.skip_layer,
    (CONTRIB, "SkipSimplifiedLayerNormalization"): norms.skip_rms,
}
"""Bodies of normalizations, which are left as they are but where an execution provider has none of them."""
RUN: Mapping[tuple[str, str], Callable[[FusedNode], Body]] = {
    (CONTRIB, "FusedMatMul"): packed.product,
    (CONTRIB, "PackedAttention"): packed.attention,
    (CONTRIB, "PackedMultiHeadAttention"): packed.multi_head_attention,
    (CONTRIB, "RemovePadding"): packed.remove_padding,
    (CONTRIB, "RestorePadding"): packed.restore_padding,
}
"""Bodies that are run only, as references: how many tokens there are no shape tells."""


def has_body(node: ir.Node) -> bool:
    """Whether the node is an operator that has a body."""
    return _key(node) in BODIES or _key(node) in NORMS


def body_of(fused: FusedNode) -> Body:
    """The body of a node, of which every input and attribute is read.

    Raises:
        Refused: It cannot be written, or would not be exact.
    """
    found = {**BODIES, **NORMS, **RUN}[_key(fused.node)](fused)
    fused.finish()
    return found


def rehearsals(fused: FusedNode) -> Iterator[FusedNode]:
    """The operator on inputs that are judged in the place of its own; none where its own are judged."""
    return group_query_attention.rehearsals(fused) if fused.node.op_type == "GroupQueryAttention" else iter(())


def _key(node: ir.Node) -> tuple[str, str]:
    return plain_domain(node.domain), node.op_type
