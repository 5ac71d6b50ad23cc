"""Stand-ins: standard operators that are read instead of those that only training graphs have.

    Dropout(P, ratio, True)      Identity(P), while the weights are read; the dropout is put back into the site
    BiasSoftmax(S, bias)         Softmax(S + bias)
    ConcatTraining(a, b, ...)    Concat(a, b, ...)
    Where(sees, P, 0)            Identity(P), where `guarded_rows` finds that rows without a key are set to 0

The stand-ins are taken out again where nothing was fused, so that unfused nodes stay as they were.

ONNX Runtime takes two lengths that meet in a broadcast for one, and writes that down: a mask of shape (b, 1, 1, t) is annotated
as (b, 4, s, s). So the lengths of inputs are unknown here, and everything else follows from the operators; only
where those are not ONNX's own an annotation is all there is. Annotations come back when the graph has been read.

A triangle in a buffer is read as causal only if its content is known. So it is known while a graph is read, and the part that a
fused attention relies on is reported, so that a step with other content is no step of that graph (`graphs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.constants import Array, attribute, is_standard
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.training.ortmodule.guarded_rows import Guard, PlainMasks, find_guard
from onnx_attnfuse.training.ortmodule.products import TRAINING, drops


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
                self._replace(node, [ir.node("Identity", [node.inputs[1 if node in self._guards else 0]])])
            elif node.domain == TRAINING and node.op_type == "BiasSoftmax" and _is_last(node):
                added = ir.node("Add", node.inputs[:2])
                self._replace(node, [added, ir.node("Softmax", added.outputs, {"axis": -1})])
            elif node.domain == TRAINING and node.op_type == "ConcatTraining":
                self._replace(node, [ir.node("Concat", node.inputs, {"axis": attribute(node, "axis", 0)})])

    def _replace(self, node: ir.Node, readable: list[ir.Node]) -> None:
        result = node.outputs[0]
        for index, new in enumerate(readable):
            new.name = f"{node.name}/{index}"
            new.outputs[0].name = f"{result.name}/{index}"
            new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
        self._graph.insert_after(node, readable)
        result.replace_all_uses_with(readable[-1].outputs[0], replace_graph_outputs=True)
        self._all.append(StandIn(node, tuple(readable)))

    def replaced_by(self, node: ir.Node) -> ir.Node | None:
        """The node that `node` replaces."""
        return next((item.node for item in self._all if node in item.readable), None)

    def guard(self, replaced: Iterable[ir.Node]) -> Guard | None:
        """The guard of rows without a key among nodes that others replace."""
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


class Annotations:
    """The shapes that were taken out of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        """Takes the shapes out of the graph."""
        self._kept: list[tuple[ir.Value, ir.Shape]] = []
        for value in graph.inputs:
            if value.shape is not None and not value.shape.is_static():
                self._keep(value, ir.Shape([None] * len(value.shape)))
        for node in graph:
            for value in node.outputs if is_standard(node) else ():
                self._keep(value, None)

    def _keep(self, value: ir.Value, shape: ir.Shape | None) -> None:
        if value.shape is not None:
            self._kept.append((value, value.shape))
            value.shape = shape

    def restore(self) -> None:
        """Puts the shapes back."""
        for value, shape in self._kept:
            value.shape = shape


class Buffers:
    """The buffers among the inputs of a graph, with initializers in their place while it is read."""

    def __init__(self, graph: ir.Graph, contents: Mapping[str, Array]) -> None:
        """Puts the initializers in.

        Args:
            graph: The graph.
            contents: By the names of inputs, their contents in every step.
        """
        self._graph = graph
        self._inputs: dict[ir.Value, ir.Value] = {}
        for value in graph.inputs:
            array = contents.get(value.name or "")
            if array is None:
                continue
            constant = ir.Value(name=f"{value.name}/constant", const_value=ir.tensor(array))
            constant.type, constant.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            graph.register_initializer(constant)
            value.replace_all_uses_with(constant)
            self._inputs[constant] = value

    def read_by(self, spec: AttentionSpec) -> tuple[str, ...]:
        """The names of buffers whose content an attention was read with."""
        operands = {source.indexed.value for operand in spec.operands() for source in operand}
        found = [*spec.values(), *(value for node in spec.nodes for value in node.inputs if value is not None)]
        seen = set(sources(found, lambda value, node: value not in operands and node.op_type != "Shape")) - operands
        return tuple(sorted(value.name or "" for constant, value in self._inputs.items() if constant in seen))

    def restore(self) -> None:
        """Makes inputs of them again."""
        for constant, value in self._inputs.items():
            constant.replace_all_uses_with(value)
            self._graph.initializers.pop(constant.name or "", None)
        self._inputs.clear()
