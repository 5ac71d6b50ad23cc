"""Softmax operators, with the axis they normalise over."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts

_ONE_AXIS_SINCE = 13


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
    is_gated: bool = False
    """The weights are multiplied by the share that a sink leaves, so that a row of -inf is NaN."""


def find_softmax(node: ir.Node, facts: Facts, opset: int) -> Softmax | None:
    """Reads `node` as a softmax, or returns None."""
    if not is_standard(node, "Softmax") or not node.inputs or node.inputs[0] is None:
        return None
    axis = softmax_axis(node, facts, opset)
    return None if axis is None else Softmax(node, node.inputs[0], node.outputs[0], axis, (node,))


def softmax_axis(node: ir.Node, facts: Facts, opset: int) -> int | None:
    """The one axis that a Softmax or LogSoftmax runs over, -1 for the last of an unknown rank; None if it is several.

    Before opset 13 they run over all axes from theirs on, which by default is the second.
    """
    axis: int = attribute(node, "axis", -1 if opset >= _ONE_AXIS_SINCE else 1)
    rank = None if node.inputs[0] is None else facts.rank(node.inputs[0])
    if rank is None:
        return axis if axis == -1 else None
    axis %= rank
    return axis if opset >= _ONE_AXIS_SINCE or axis == rank - 1 else None
