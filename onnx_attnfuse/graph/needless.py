"""Nodes that change nothing: an Identity, `x + 0`, `x * 1`. Some converters put one behind nearly every operator."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.graph.constants import all_nodes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_standard

_NEUTRAL: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "Add": (0.0, (0, 1)),
    "Sub": (0.0, (1,)),
    "Mul": (1.0, (0, 1)),
    "Div": (1.0, (1,)),
    "Pow": (1.0, (1,)),
}
"""The number that changes nothing, and the inputs that may be it."""


def drop_identities(graph: ir.Graph | ir.Function) -> int:
    """Takes every Identity out that may go, in graphs inside too: what a graph gives out is made in it, and given out once.

    onnx-ir's pass takes those too with which a branch gives out a value of the graph around it, which no session loads.
    """
    return sum(_drop(node, node.inputs[0]) for node in tuple(all_nodes(graph)) if is_standard(node, "Identity"))


def drop_needless(graph: ir.Graph | ir.Function, facts: Facts) -> int:
    """Takes out what changes nothing and gives nothing out of the graph; sums and products have to keep shape and type."""
    count = 0
    for node in tuple(graph):
        if is_standard(node, "Identity", *_NEUTRAL) and not node.outputs[0].is_graph_output():
            count += _drop(node, node.inputs[0] if node.op_type == "Identity" else _unchanged(node, facts))
    return count


def _unchanged(node: ir.Node, facts: Facts) -> ir.Value | None:
    """The operand that a node gives out as it is."""
    neutral, places = _NEUTRAL[node.op_type]
    answer = node.outputs[0]
    dims, dtype = facts.dims(answer), facts.dtype(answer)
    for place in places:
        number, other = node.inputs[place], node.inputs[1 - place]
        if number is None or other is None or facts.number(number) != neutral or dims is None or dtype is None:
            continue
        if facts.dims(other) == dims and facts.dtype(other) == dtype:
            return other
    return None


def _drop(node: ir.Node, source: ir.Value | None) -> bool:
    """Takes a node out that gives `source` out again, if nothing else depends on its being there."""
    if source is None or node.graph is None:
        return False
    (answer,), made = node.outputs, source.producer()
    if answer.is_graph_output():
        if made is None or made.graph is not node.graph or source.is_graph_output():
            return False
        source.name, answer.name = answer.name, None
        source.type, source.shape = answer.type, answer.shape
    answer.replace_all_uses_with(source, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    return True
