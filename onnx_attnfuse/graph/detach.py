"""Taking needless nodes out of a graph so that they can be put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.graph.constants import subgraphs


@dataclasses.dataclass(frozen=True)
class Detached:
    """Nodes taken out, in graph order, each with its inputs."""

    nodes: tuple[tuple[ir.Node, tuple[ir.Value | None, ...]], ...]

    def restore(self, before: ir.Node) -> None:
        """Puts them back in front of a node; their inputs are computed before it."""
        graph = before.graph
        assert graph is not None
        for node, inputs in self.nodes:
            for place, value in enumerate(inputs):
                node.replace_input_with(place, value)
            graph.insert_before(before, node)


def detach(values: Iterable[ir.Value]) -> Detached:
    """Takes out the producers of `values` where nothing uses them, then nodes that only they used.

    Initializers stay, and so do nodes with a graph of their own.
    """
    found: list[tuple[ir.Node, tuple[ir.Value | None, ...]]] = []
    stack = list(values)
    while stack:
        node = stack.pop().producer()
        graph = None if node is None else node.graph
        if node is None or graph is None or any(subgraphs(node)):
            continue
        if any(output.is_graph_output() or output.uses() for output in node.outputs):
            continue
        inputs = tuple(node.inputs)
        for place in range(len(inputs)):
            node.replace_input_with(place, None)
        graph.remove(node)
        found.append((node, inputs))
        stack += [value for value in inputs if value is not None]
    return Detached(tuple(reversed(found)))
