"""Which operators are decomposed, when their bodies are exact, and why others are not."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import new_axes
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import element, has_nan
from onnx_attnfuse.attention.masks.fully_masked import DISAGREEING, rows_disagree
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.bodies.table import body_of, has_body
from onnx_attnfuse.graph.ops import is_attention, is_standard
from onnx_attnfuse.graph.schemas import why_unknown
from onnx_attnfuse.kernels.operators import info_of
from onnx_attnfuse.reasons import Reason, Refused


def is_fused(node: ir.Node) -> bool:
    """Whether the node is an operator that stands for a part of attention, or removes padding for one."""
    return is_attention(node) or info_of(node) is not None


def why_kept(node: ir.Node) -> Reason | None:
    """Why a fused operator cannot be decomposed whatever its inputs are; None if it may be."""
    info, unknown = info_of(node), why_unknown(node)
    if unknown is not None:
        return Reason("unread-part", unknown, node.name)
    if has_body(node):
        return None
    if info is not None and info.packed:
        message = f"{node.op_type} works on tokens without padding, whose number no shape tells"
        return Reason("packed", message, node.name)
    return Reason("not-spelled", f"com.microsoft.{node.op_type} cannot be decomposed", node.name)


def exact_body(fused: FusedNode) -> Body:
    """The body of an operator, which computes what all kernels do.

    Raises:
        Refused: It cannot be written, a mask has NaN in it, or kernels disagree on its rows without a key.
    """
    found, facts = body_of(fused), fused.build.facts
    for mask in found.masks:
        indexed, reader = IndexedValue(mask, new_axes(fused.dims(mask))), Reader(facts)
        if has_nan(element(indexed, reader)):
            raise Refused("nan-fill", "the mask contains NaN, which makes whole rows NaN", fused.node.name)
        if is_standard(fused.node) and rows_disagree(indexed, reader, Bounds(facts), facts.opset):
            raise Refused("kernels-disagree", DISAGREEING, fused.node.name)
    return found
