"""A piece of a graph as a model of its own, from the values at which symbolic execution ended to one result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx
import onnx_ir as ir

from onnx_attnfuse.certify.pairing import Side
from onnx_attnfuse.graph.constants import all_nodes, constant_tensor, subgraphs


def captured(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads: its inputs, and what its branches and bodies read from around them."""
    yield from (value for value in node.inputs if value is not None)
    for graph in subgraphs(node):
        inside = {*graph.inputs, *(output for inner in all_nodes(graph) for output in inner.outputs)}
        inside.update(graph.initializers.values())
        read = [value for inner in all_nodes(graph) for value in inner.inputs if value is not None]
        yield from (value for value in (*read, *graph.outputs) if value not in inside)


def piece(side: Side, result: ir.Value, ends: Callable[[ir.Value], bool]) -> tuple[onnx.ModelProto, Sequence[ir.Value]]:
    """The model that computes `result`, and the values that are its inputs.

    Args:
        side: The model that it is a part of.
        result: What it computes.
        ends: Whether it is given a value.
    """
    nodes: dict[ir.Node, None] = {}
    given: dict[ir.Value, None] = {}
    constants: dict[ir.Value, None] = {}
    pending: list[tuple[ir.Value, bool]] = [(result, False)]
    done: set[ir.Value] = set()
    while pending:
        value, ready = pending.pop()
        node = value.producer()
        if ready and node is not None:
            nodes[node] = None
            continue
        if value in done:
            continue
        done.add(value)
        if constant_tensor(value) is not None and (node is None or node.op_type == "Constant"):
            constants[value] = None
        elif node is None or (ends(value) and value is not result):
            given[value] = None
        else:
            pending.append((value, True))
            pending.extend((item, False) for item in captured(node))
    return _model(side, result, list(nodes), list(given), list(constants)), list(given)


def _model(
    side: Side, result: ir.Value, nodes: Sequence[ir.Node], given: Sequence[ir.Value], constants: Sequence[ir.Value]
) -> onnx.ModelProto:
    facts = side.scope.facts
    inputs: list[onnx.ValueInfoProto] = []
    for value in given:
        dtype, dims = facts.dtype(value), facts.dims(value)
        shape = None if dims is None else [dim if isinstance(dim, int) else None for dim in dims]
        inputs.append(onnx.helper.make_tensor_value_info(value.name or "", int(dtype or ir.DataType.FLOAT), shape))
    tensors: list[onnx.TensorProto] = []
    for value in constants:
        tensor = constant_tensor(value)
        assert tensor is not None
        tensors.append(ir.serde.serialize_tensor(ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)))
    dtype = facts.dtype(result) or ir.DataType.FLOAT
    output = onnx.helper.make_tensor_value_info(result.name or "", int(dtype), None)
    graph = onnx.helper.make_graph([ir.serde.serialize_node(node) for node in nodes], "piece", inputs, [output], tensors)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in side.model.opset_imports.items()]
    functions = [ir.serde.serialize_function(item) for item in side.model.functions.values()]
    return onnx.helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
