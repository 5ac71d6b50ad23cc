"""Classes of operators, by name."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard

_NO_SOFTMAX = frozenset(["LinearAttention"])
"""Operators of com.microsoft that are called attention and have no softmax."""


def is_attention(node: ir.Node) -> bool:
    """Whether the node is an attention by itself; com.microsoft calls all of its own so, those to come included."""
    if node.domain == "com.microsoft":
        return node.op_type.endswith("Attention") and node.op_type not in _NO_SOFTMAX
    return is_standard(node, "Attention")
