"""A snapshot of a graph's nodes and values, written down so that it can be put back after a change that failed halfway."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import subgraphs


class Snapshot:
    """One graph and those nested in it: inputs, order, connections, names, types and initializers. Taken in linear time."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._given = graph, tuple(graph.inputs)
        self._parts = [(part, tuple(part), tuple(part.outputs), tuple(part.initializers.values())) for part in _parts(graph)]
        self._inputs = [(node, tuple(node.inputs)) for _, nodes, _, _ in self._parts for node in nodes]
        values = [value for part, nodes, _, held in self._parts for value in _values(part, nodes, held)]
        self._values = [(value, value.name, value.shape, value.type) for value in values]

    def restore(self) -> None:
        """Puts everything back; nodes that were added since are taken out and read nothing any more."""
        kept = {node for node, _ in self._inputs}
        added = [node for node in self._graph.all_nodes() if node not in kept]
        for part, _, outputs, _ in self._parts:
            for place, value in enumerate(outputs):
                part.outputs[place] = value
        for node in (*added, *kept):
            if node.graph is not None:
                node.graph.remove(node)
        for node in added:
            for inner in subgraphs(node):
                inner.outputs.clear()
            for place in range(len(node.inputs)):
                node.replace_input_with(place, None)
        for node, inputs in self._inputs:
            for place, value in enumerate(inputs):
                node.replace_input_with(place, value)
        for part, nodes, _, _ in self._parts:
            part.extend(nodes)
        if tuple(self._graph.inputs) != self._given:
            self._graph.inputs.clear()
            self._graph.inputs.extend(self._given)
        self._restore_values()

    def _restore_values(self) -> None:
        """Names first: initializers are held by them."""
        for part, _, _, _ in self._parts:
            part.initializers.clear()
        for value, name, shape, element in self._values:
            value.name, value.shape, value.type = name, shape, element
        for part, _, _, held in self._parts:
            for value in held:
                part.initializers.add(value)


def _parts(graph: ir.Graph) -> Iterator[ir.Graph]:
    pending = [graph]
    while pending:
        part = pending.pop()
        yield part
        pending += [inner for node in part for inner in subgraphs(node)]


def _values(part: ir.Graph, nodes: tuple[ir.Node, ...], held: tuple[ir.Value, ...]) -> Iterator[ir.Value]:
    yield from part.inputs
    yield from held
    for node in nodes:
        yield from node.outputs
