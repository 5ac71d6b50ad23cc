"""Which operators are spelled out, by what, and why others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.transforms.decompose import (
    attention,
    group_query_attention,
    multi_head_attention,
    onnx_attention,
    rotary_embedding,
)
from onnx_attnfuse.transforms.decompose.site import Answer, Site

Speller = Callable[[Site], Answer]
Rehearsals = Callable[[Site], Iterator[Site]]

_CONTRIB: dict[str, Speller] = {
    attention.OP: attention.spelled,
    group_query_attention.OP: group_query_attention.spelled,
    multi_head_attention.OP: multi_head_attention.spelled,
    rotary_embedding.OP: rotary_embedding.spelled,
}
_STANDARD: dict[str, Speller] = {onnx_attention.OP: onnx_attention.spelled, rotary_embedding.OP: rotary_embedding.spelled}
_PACKED = frozenset("PackedAttention PackedMultiHeadAttention RemovePadding RestorePadding".split())
_REHEARSED: dict[Speller, Rehearsals] = {group_query_attention.spelled: group_query_attention.rehearsals}


def is_fused(node: ir.Node) -> bool:
    """Whether the node is an operator that stands for a part of attention, or removes padding for one."""
    if is_standard(node):
        return node.op_type in _STANDARD
    return is_attention(node) or (node.domain == "com.microsoft" and (node.op_type in _CONTRIB or node.op_type in _PACKED))


def speller(node: ir.Node) -> Speller | Reason:
    """What spells the operator out, or why nothing does."""
    found = (_STANDARD if is_standard(node) else _CONTRIB).get(node.op_type)
    if found is not None:
        return found
    if node.op_type in _PACKED:
        message = f"{node.op_type} works on tokens without padding, whose number no shape tells"
        return Reason("packed", message, node.name)
    return Reason("not-spelled", f"com.microsoft.{node.op_type} is not spelled out", node.name)


def rehearsals(found: Speller, site: Site) -> Iterator[Site]:
    """The operator on inputs that are judged in the place of its own; none where its own are judged."""
    rehearse = _REHEARSED.get(found)
    return iter(()) if rehearse is None else rehearse(site)
