"""Removal of unused nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.constants import reads, subgraphs


def sweep(values: Iterable[ir.Value | None]) -> int:
    """Removes the producers of `values` where nothing uses them, then nodes that only they used; returns how many nodes went.

    Initializers that lose their last use go too.
    """
    removed = 0
    stack = [value for value in values if value is not None]
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None:
            _drop_initializer(value)
            continue
        graph = node.graph
        if graph is None or any(output.is_graph_output() or output.uses() for output in node.outputs):
            continue
        stack += reads(node)
        graph.remove(node, safe=True)
        removed += 1
    return removed


def sweep_unused(nodes: Sequence[ir.Node]) -> int:
    """Removes those of `nodes`, given in graph order, that nothing uses, then nodes that only they used; returns their number."""
    return sweep(output for node in reversed(nodes) for output in node.outputs)


def take_back(nodes: Sequence[ir.Node], constants: Iterable[ir.Value] = ()) -> None:
    """Removes those of new `nodes`, given in graph order, and of new `constants` that nothing uses, and nothing else."""
    for node in reversed(nodes):
        if node.graph is None or any(output.is_graph_output() or output.uses() for output in node.outputs):
            continue
        for nested in subgraphs(node):
            nested.outputs.clear()
            take_back(tuple(nested))
        node.graph.remove(node, safe=True)
    for value in constants:
        _drop_initializer(value)


def _drop_initializer(value: ir.Value) -> None:
    graph = value.graph
    if not isinstance(graph, ir.Graph) or value.uses() or value.is_graph_input() or value.is_graph_output():
        return
    if value.name is not None and graph.initializers.get(value.name) is value:
        del graph.initializers[value.name]
