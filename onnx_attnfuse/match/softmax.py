"""Finding every Softmax, also one that is spelled out as Exp, ReduceSum and Div."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of


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
    """Reads `node` as the last node of a softmax, or returns None."""
    if not is_standard(node) or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Softmax":
        rank = facts.rank(node.inputs[0])
        axis = attribute(node, "axis", -1 if opset >= 13 else 1)
        if rank is None:
            return Softmax(node, node.inputs[0], node.outputs[0], axis, (node,)) if axis == -1 else None
        axis %= rank
        if opset < 13 and axis != rank - 1:
            return None
        return Softmax(node, node.inputs[0], node.outputs[0], axis, (node,))
    if node.op_type == "Exp":
        return _of_logarithms(node, facts, opset)
    return _spelled_out(node, facts) if node.op_type == "Div" else None


def _of_logarithms(node: ir.Node, facts: Facts, opset: int) -> Softmax | None:
    """`exp(log_softmax(x))`."""
    inner = node.inputs[0].producer() if node.inputs[0] is not None else None
    if inner is None or inner.op_type != "LogSoftmax" or inner.inputs[0] is None or opset < 13:
        return None
    rank = facts.rank(inner.inputs[0])
    axis: int = attribute(inner, "axis", -1)
    return None if rank is None else Softmax(node, inner.inputs[0], node.outputs[0], axis % rank, (inner, node))


def _spelled_out(node: ir.Node, facts: Facts) -> Softmax | None:
    exponentials, total = node.inputs[0], node.inputs[1]
    if exponentials is None or total is None:
        return None
    exp, reduced = exponentials.producer(), total.producer()
    if exp is None or reduced is None or exp.op_type != "Exp" or reduced.op_type != "ReduceSum":
        return None
    rank = facts.rank(exponentials)
    if reduced.inputs[0] is not exponentials or rank is None or not attribute(reduced, "keepdims", 1):
        return None
    axes = axes_of(reduced, 1, rank, facts)
    if axes is None or len(axes) != 1 or exp.inputs[0] is None:
        return None
    return Softmax(node, exp.inputs[0], node.outputs[0], axes[0], (exp, reduced, node))
