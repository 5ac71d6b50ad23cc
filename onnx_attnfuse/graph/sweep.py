"""Removal of nodes: unused ones, those that return their input, and needless ones that can be put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.constants import all_nodes, reads, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_standard
from onnx_attnfuse.graph.rules.reading import slice_bounds
from onnx_attnfuse.graph.uses import is_copy


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
        _empty_bodies(node)
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
        _empty_bodies(node)
        node.graph.remove(node, safe=True)
    for value in constants:
        _drop_initializer(value)


def _empty_bodies(node: ir.Node) -> None:
    """Removes all nodes of the graphs nested in a node, so that nothing there uses a value around it."""
    for nested in subgraphs(node):
        nested.outputs.clear()
        take_back(tuple(nested))


def _drop_initializer(value: ir.Value) -> None:
    graph = value.graph
    if not isinstance(graph, ir.Graph) or value.uses() or value.is_graph_input() or value.is_graph_output():
        return
    if value.name is not None and graph.initializers.get(value.name) is value:
        del graph.initializers[value.name]


def drop_identities(graph: ir.Graph) -> int:
    """Takes every Identity out that may go, in graphs inside too: an output of a graph is computed in it, and is its output once.

    onnx-ir's pass takes those too with which a branch gives out a value of the graph around it, which no session loads.
    """
    return sum(_drop(node) for node in tuple(all_nodes(graph)) if is_standard(node, "Identity"))


def drop_inner_copies(graph: ir.Graph) -> int:
    """Takes out each node that gives its only input and none of the graph's results; returns how many there were."""
    return sum(map(_drop, [node for node in graph if is_copy(node) and not node.outputs[0].is_graph_output()]))


def is_whole(node: ir.Node, facts: Facts) -> bool:
    """Whether a Slice cuts nothing off, and turns nothing round."""
    value = node.inputs[0] if is_standard(node, "Slice") else None
    dims = facts.dims(value)
    bounds = None if dims is None else slice_bounds(node, len(dims), facts)
    return bounds is not None and all(step == 1 for _, _, step in bounds.values()) and facts.dims(node.outputs[0]) == dims


def _drop(node: ir.Node) -> bool:
    """Takes out a node that gives its only input, if nothing depends on its being there."""
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
