"""Whole models of float16 with each result rounded, as on a GPU, where ONNX Runtime's CPU provider rounds the last of a chain.

    Add ── Softmax        becomes        Add ── SequenceConstruct ── SequenceAt ── Softmax

It has no float16 kernels for most operators, puts casts around those of float32, and takes out the two that meet between
neighbours. So a score of 3 beside a mask of -65504 counts there, and on a GPU it is gone. A sequence is nothing that is cast,
unlike an Identity or a Cast, which it takes out with the others.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import subgraphs
from onnx_attnfuse.graph.facts import Facts

_SINCE = 11
"""The opset from which on there are sequences."""


def has_float16(model: ir.Model) -> bool:
    """Whether something of a model is computed in float16."""
    return ir.DataType.FLOAT16 in _types(model).values()


def rounded(model: ir.Model) -> ir.Model:
    """A copy of the model that rounds each inner result of float16, and in branches what may be one.

    Before opset 11 there are no sequences, and the model itself comes back.
    """
    if model.opset_imports.get("", 0) < _SINCE:
        return model
    types, copy = _types(model), model.clone()
    graphs = [copy.graph]
    for graph in graphs:
        nodes = list(graph)
        wanted = {ir.DataType.FLOAT16} if graph is copy.graph else {ir.DataType.FLOAT16, None}
        graphs += [inner for node in nodes for inner in subgraphs(node)]
        halves = [
            (node, value)
            for node in nodes
            for value in node.outputs
            if types.get(value.name or "", value.dtype) in wanted and value.uses()
        ]
        if halves:
            zero = ir.node("Constant", [], {"value": ir.tensor(np.asarray(0), name="zero")})
            zero.outputs[0].name = f"{graph.name}/zero of rounding"
            graph.insert_before(nodes[0], zero)
            for node, value in halves:
                _round(graph, node, value, zero.outputs[0])
    return copy


def _types(model: ir.Model) -> dict[str, ir.DataType | None]:
    """The element types of the results of the main graph's nodes, by name."""
    facts = Facts(model.graph)
    return {value.name or "": facts.dtype(value) for node in model.graph for value in node.outputs}


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value, zero: ir.Value) -> None:
    """Puts a value through a sequence of one."""
    users = list(value.uses())
    held = ir.node("SequenceConstruct", [value])
    taken = ir.node("SequenceAt", [held.outputs[0], zero])
    held.outputs[0].name, taken.outputs[0].name = f"{value.name}/held", f"{value.name}/rounded"
    graph.insert_after(node, [held, taken])
    for user, place in users:
        user.replace_input_with(place, taken.outputs[0])
