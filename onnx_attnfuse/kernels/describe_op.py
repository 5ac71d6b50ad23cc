"""The parameters of an attention operator that exists in a model, read off its inputs alone, without the meaning of its mask.

params = params_of_node(node, facts)    # to forecast its kernel; a Reason where they are unknown
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.schemas import why_unknown
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.op_node import OpNode
from onnx_attnfuse.kernels.operators import info_of
from onnx_attnfuse.reasons import Reason, Refused


def params_of_node(node: ir.Node, facts: Facts) -> AttentionParams | Reason:
    """The parameters of the attention that a fused operator computes, or which of them is not known."""
    info = info_of(node)
    if info is None or info.describe is None:
        return Reason("unknown-operator", f"the kernels of {node.op_type} are not known", node.name)
    unknown = why_unknown(node)
    if unknown is not None:
        return Reason("unread-part", unknown, node.name)
    try:
        return info.describe(OpNode(info.key, tuple(info.inputs), node, facts))
    except Refused as refused:
        return refused.reason
