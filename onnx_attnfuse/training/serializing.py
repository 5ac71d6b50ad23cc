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
    """Puts a graph into the place of another.

    Results that nobody wants stay where they are last too: PyTorch's operators are called with as many as their schema has.
    """
    written = ir.serde.serialize_graph(read)
    for node, proto in zip(read, written.node, strict=True):
        proto.output.extend([""] * (len(node.outputs) - len(proto.output)))
    graph.CopyFrom(written)
