"""Softmax operators, with the axis they normalise over."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A softmax over one axis."""

    node: ir.Node
    """The node it is known by."""
    scores: ir.Value
    weights: ir.Value
    axis: int
    nodes: tuple[ir.Node, ...]
    sink: ir.Value | None = None
    """One more score in each row, whose weight is dropped."""


def find_softmax(node: ir.Node, facts: Facts, opset: int) -> Softmax | None:
    """Reads `node` as a softmax, or returns None."""
    if not is_standard(node, "Softmax") or not node.inputs or node.inputs[0] is None:
        return None
    rank = facts.rank(node.inputs[0])
    axis: int = attribute(node, "axis", -1 if opset >= 13 else 1)
    if rank is None:
        return Softmax(node, node.inputs[0], node.outputs[0], axis, (node,)) if axis == -1 else None
    axis %= rank
    if opset < 13 and axis != rank - 1:
        return None
    return Softmax(node, node.inputs[0], node.outputs[0], axis, (node,))
