"""Gather with its indices laid flat, for an execution provider that is wrong where they have many axes.

Gather(data, indices)                                            (b, 1, 1, s) of (n, 1), as padding is looked up
Reshape(Gather(data, Reshape(indices)))                          the same elements
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.rewriting import GraphContext

_FLATTENING = Subject("laying indices flat")
_MOST_AXES = 2


def flatten_indices(graph: GraphContext) -> int:
    """Lays the indices of each Gather flat that have more than two axes, in place, each verified; how many there were."""
    done, facts, builder = 0, graph.scope.facts, graph.builder
    for node in tuple(graph.scope.graph):
        found = _read(node, facts)
        if found is None:
            continue
        data, indices, rest = found
        lengths = dims_of(builder, indices)
        with graph.rewrite(node, _FLATTENING) as edit:
            flat = builder.reshape(indices, (math.prod(lengths),))
            rows = builder.node("Gather", [data, flat], {"axis": 0})
            edit.replace([(node.outputs[0], builder.reshape(rows, (*lengths, *rest)))], [data, indices])
            done += 1
    return done


def _read(node: ir.Node, facts: Facts) -> tuple[ir.Value, ir.Value, Dims] | None:
    """The table of a Gather, its indices, and the shape of a row; None where it takes no rows, or its indices have few axes."""
    if not is_standard(node, "Gather") or None in node.inputs:
        return None
    data, indices = node.inputs
    assert data is not None
    assert indices is not None
    dims, lengths = facts.dims(data), facts.dims(indices)
    if dims is None or lengths is None or len(lengths) <= _MOST_AXES or attribute(node, "axis", 0) not in {0, -len(dims)}:
        return None
    return data, indices, dims[1:]
