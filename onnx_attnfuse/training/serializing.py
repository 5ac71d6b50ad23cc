"""A gradient graph from and to what ORTModule hands over."""

from __future__ import annotations

import onnx
import onnx_ir as ir


def read_graph(graph: onnx.GraphProto, opset: int) -> ir.Graph:
    """The graph as the engine reads it; it does not say which opset it is of."""
    read = ir.serde.deserialize_graph(graph)
    read.opset_imports[""] = opset
    return read


def write_graph(read: ir.Graph, graph: onnx.GraphProto) -> None:
    """Puts a graph into the place of another."""
    graph.CopyFrom(ir.serde.serialize_graph(read))
