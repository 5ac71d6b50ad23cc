"""Operators that gradient graphs have and exports have not."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.ops import CONTRIB

TRAINING = CONTRIB
"""The domain of ONNX Runtime's operators for training."""
ATEN = "org.pytorch.aten"
"""The domain of the operator that calls PyTorch."""


def reads_gradient(node: ir.Node) -> bool:
    """Whether the node differentiates a softmax: from the gradient of its result and the result itself."""
    return node.domain == TRAINING and node.op_type in {"SoftmaxGrad", "SoftmaxGrad_13"}


def drops(node: ir.Node) -> bool:
    """Whether the node sets elements to 0 at random and can say which."""
    known = is_standard(node, "Dropout") or (node.domain == TRAINING and node.op_type == "BitmaskDropout")
    return known and len(node.inputs) > 2 and node.inputs[2] is not None


def finds_repeated_axes(node: ir.Node) -> bool:
    """Whether the node tells, of two shapes that broadcast, the axes along which each of them is repeated."""
    return node.domain == TRAINING and node.op_type == "BroadcastGradientArgs"


def calls(node: ir.Node) -> str | None:
    """The PyTorch operator that a node calls."""
    if node.domain != ATEN or node.op_type != "ATen" or "operator" not in node.attributes:
        return None
    return node.attributes["operator"].as_string()
