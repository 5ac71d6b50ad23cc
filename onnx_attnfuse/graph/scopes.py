"""Every graph of a model: the main graph, the graphs nested in nodes, and model-local functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import subgraphs
from onnx_attnfuse.graph.facts import Facts


@dataclasses.dataclass(frozen=True)
class Scope:
    """One graph with what is known of its values."""

    path: str
    """Where it stands: the main graph's name, `If_0/then_branch`, or a function's identifier."""
    graph: ir.Graph | ir.Function
    facts: Facts
    opset: int


def scopes(model: ir.Model) -> Iterator[Scope]:
    """All graphs of `model`, outer before inner."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    yield from _nested(model.graph, model.graph.name or "main", Facts(model.graph), opset)
    for function in model.functions.values():
        path = f"{function.domain}::{function.name}"
        yield from _nested(function, path, Facts(function), function.opset_imports.get("", opset))


def _nested(graph: ir.Graph | ir.Function, path: str, facts: Facts, opset: int) -> Iterator[Scope]:
    yield Scope(path, graph, facts, opset)
    for node in graph:
        for inner in subgraphs(node):
            name = next((key for key, item in node.attributes.items() if item.value is inner), "body")
            yield from _nested(inner, f"{node.name or node.op_type}/{name}", facts, opset)


def count_ops(model: ir.Model) -> Counter[str]:
    """Nodes by `domain::op_type` (`op_type` alone in the standard domain), everywhere in the model."""
    counted: Counter[str] = Counter()
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            domain = node.domain if node.domain not in {"", "ai.onnx"} else ""
            counted[f"{domain}::{node.op_type}" if domain else node.op_type] += 1
    return counted


def all_names(model: ir.Model) -> set[str]:
    """Every name of a value or node in the model."""
    names: set[str] = set()
    for graph in (model.graph, *model.functions.values()):
        names.update(value.name for value in graph.inputs if value.name)
        if isinstance(graph, ir.Graph):
            names.update(graph.initializers)
        for node in graph.all_nodes():
            if node.name:
                names.add(node.name)
            names.update(value.name for value in node.outputs if value.name)
            for inner in subgraphs(node):
                names.update(value.name for value in inner.inputs if value.name)
                names.update(inner.initializers)
    return names
