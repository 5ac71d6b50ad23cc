"""Nodes that return their input: an Identity, `x[0:]`. Some converters put one after nearly every operator."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import all_nodes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_standard
from onnx_attnfuse.graph.rules.reading import slice_bounds


def drop_identities(graph: ir.Graph) -> int:
    """Takes every Identity out that may go, in graphs inside too: an output of a graph is computed in it, and is its output once.

    onnx-ir's pass takes those too with which a branch gives out a value of the graph around it, which no session loads.
    """
    return sum(_drop(node) for node in tuple(all_nodes(graph)) if is_standard(node, "Identity"))


def drop_inner_identities(graph: ir.Graph) -> int:
    """Takes out each Identity of a graph that does not give out one of its results; returns how many there were."""
    identities = [node for node in graph if is_standard(node, "Identity") and not node.outputs[0].is_graph_output()]
    return sum(map(_drop, identities))


def is_whole(node: ir.Node, facts: Facts) -> bool:
    """Whether a Slice cuts nothing off, and turns nothing round."""
    value = node.inputs[0] if is_standard(node, "Slice") else None
    dims = None if value is None else facts.dims(value)
    bounds = None if dims is None else slice_bounds(node, len(dims), facts)
    return bounds is not None and all(step == 1 for _, _, step in bounds.values()) and facts.dims(node.outputs[0]) == dims


def _drop(node: ir.Node) -> bool:
    """Takes an Identity out, if nothing depends on its being there."""
    source, (answer,) = node.inputs[0], node.outputs
    if source is None or node.graph is None:
        return False
    if answer.is_graph_output():
        made = source.producer()
        if made is None or made.graph is not node.graph or source.is_graph_output():
            return False
        source.name, answer.name = answer.name, None
        source.type, source.shape = answer.type, answer.shape
    answer.replace_all_uses_with(source, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    return True
