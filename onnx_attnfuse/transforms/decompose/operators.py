"""Which operators are spelled out, by what, and why others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.schemas import why_unknown
from onnx_attnfuse.kernels.operators import info_of, load
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.transforms.decompose.site import Answer, Site

Speller = Callable[[Site], Answer]


def is_fused(node: ir.Node) -> bool:
    """Whether the node is an operator that stands for a part of attention, or removes padding for one."""
    return is_attention(node) or info_of(node) is not None


def speller(node: ir.Node) -> Speller | Reason:
    """The function that spells a fused operator out, or why there is none."""
    info, unknown = info_of(node), why_unknown(node)
    if unknown is not None:
        return Reason("unread-part", unknown, node.name)
    if info is not None and info.decomposition is not None:
        return load(f"{info.decomposition}:spelled")
    if info is not None and info.packed:
        message = f"{node.op_type} works on tokens without padding, whose number no shape tells"
        return Reason("packed", message, node.name)
    return Reason("not-spelled", f"com.microsoft.{node.op_type} is not spelled out", node.name)


def rehearsals(site: Site) -> Iterator[Site]:
    """The operator on inputs that are judged in the place of its own; none where its own are judged."""
    rehearse = getattr(load(site.info.decomposition or ""), "rehearsals", None)
    return iter(()) if rehearse is None else rehearse(site)
