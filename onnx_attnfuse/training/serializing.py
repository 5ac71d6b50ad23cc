"""Gradient graphs read from the protobuf that ORTModule passes, and written back into it."""

from __future__ import annotations

import onnx
import onnx_ir as ir


def read_graph(graph: onnx.GraphProto, opset: int) -> ir.Graph:
    """A gradient graph as onnx-ir has it; `opset` is an argument, since the protobuf lacks it."""
    read = ir.serde.deserialize_graph(graph)
    read.opset_imports[""] = opset
    return read


def write_graph(read: ir.Graph, graph: onnx.GraphProto) -> None:
    """Writes a graph over the protobuf of another."""
    graph.CopyFrom(ir.serde.serialize_graph(read))
