"""Stand-ins: standard operators that are read in the place of those that only training graphs have.

    Dropout(P, ratio, True)      Identity(P), while the weights are read; what was dropped is put back into the site
    BiasSoftmax(S, bias)         Softmax(S + bias)
    ConcatTraining(a, b, ...)    Concat(a, b, ...)
    Where(sees, P, 0)            Identity(P), where `guarded_rows` finds that rows without a key are set to 0

The stand-ins are taken out again where nothing was fused, so that what is left alone is left as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.training.guarded_rows import Guard, PlainMasks, find_guard
from onnx_attnfuse.training.operators import TRAINING, drops


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A node of a training graph, and the standard nodes that are read in its place."""

    node: ir.Node
    readable: tuple[ir.Node, ...]

    @property
    def result(self) -> ir.Value:
        """The value that is read in the place of the node's first output."""
        return self.readable[-1].outputs[0]


class StandIns:
    """The stand-ins of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        """Puts the stand-ins into the graph."""
        self._graph = graph
        self._all: list[StandIn] = []
        self._guards = {guard.node: guard for node in graph if (guard := find_guard(node)) is not None}
        self._plain = PlainMasks(graph, list(self._guards.values()))
        for node in list(graph):
            if drops(node) or node in self._guards:
                self._stand(node, [ir.node("Identity", [node.inputs[1 if node in self._guards else 0]])])
            elif node.domain == TRAINING and node.op_type == "BiasSoftmax" and _is_last(node):
                added = ir.node("Add", node.inputs[:2])
                self._stand(node, [added, ir.node("Softmax", added.outputs, {"axis": -1})])
            elif node.domain == TRAINING and node.op_type == "ConcatTraining":
                self._stand(node, [ir.node("Concat", node.inputs, {"axis": attribute(node, "axis", 0)})])

    def _stand(self, node: ir.Node, readable: list[ir.Node]) -> None:
        result = node.outputs[0]
        for index, new in enumerate(readable):
            new.name = f"{node.name}/{index}"
            new.outputs[0].name = f"{result.name}/{index}"
            new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
        self._graph.insert_after(node, readable)
        result.replace_all_uses_with(readable[-1].outputs[0], replace_graph_outputs=True)
        self._all.append(StandIn(node, tuple(readable)))

    def behind(self, node: ir.Node) -> ir.Node | None:
        """The node that `node` stands in for."""
        return next((item.node for item in self._all if node in item.readable), None)

    def guard(self, replaced: Iterable[ir.Node]) -> Guard | None:
        """The guard of rows without a key among nodes that others stand in for."""
        return next((self._guards[node] for node in replaced if node in self._guards), None)

    def forget(self) -> None:
        """Removes the nodes whose stand-ins were fused away."""
        for item in self._all:
            if item.result.producer() is None or item.readable[-1].graph is None:
                sweep(item.node.outputs)

    def restore(self) -> None:
        """Puts the nodes back where their stand-ins are still used, and takes all stand-ins out."""
        self.forget()
        for item in self._all:
            if item.readable[-1].graph is not None:
                item.result.replace_all_uses_with(item.node.outputs[0], replace_graph_outputs=True)
                sweep([item.result])
        self._plain.restore()
        self._all.clear()


def _is_last(node: ir.Node) -> bool:
    """Whether a softmax runs along the last axis."""
    rank = None if node.inputs[0] is None or node.inputs[0].shape is None else len(node.inputs[0].shape)
    axis: int = attribute(node, "axis", 1)
    return axis == -1 or (rank is not None and axis % rank == rank - 1)
