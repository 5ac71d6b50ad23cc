"""Constants that every call of a model-local function passes to it, written into the function, where readers see them.

embed_arguments(model)  # the number of inputs that are constants now
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import all_nodes, constant_array, constant_tensor, given
from onnx_attnfuse.graph.scopes import callers_first
from onnx_attnfuse.graph.tensors import bodies

_MOST_ELEMENTS = 1 << 10
"""Constants of more elements are weights, which no function gets a copy of."""


def embed_arguments(model: ir.Model) -> int:
    """Makes constants of functions' inputs that are one constant in all calls; changes the model.

    The inputs stay, with nodes that no longer read them. What a function passes on is a constant of the functions that it calls.
    """
    count = 0
    calls: dict[ir.OperatorIdentifier, list[ir.Node]] = {name: [] for name in model.functions}
    for graph in bodies(model) if calls else ():
        for node in all_nodes(graph):
            calls.get(node.op_identifier(), []).append(node)
    for function in callers_first(model):
        if "" not in function.opset_imports:
            continue
        for place, value in enumerate(function.inputs):
            tensor = _agreed(given(node, place) for node in calls[function.identifier()])
            if tensor is not None and value.uses():
                _embed(function, value, tensor)
                count += 1
    return count


def _agreed(arguments: Iterable[ir.Value | None]) -> ir.TensorProtocol | None:
    """The constant that all arguments are, bit for bit."""
    found = [_read(value) for value in arguments]
    first = found[0] if found else None
    if first is None or any(other is None or _content(other) != _content(first) for other in found):
        return None
    return first


def _read(value: ir.Value | None) -> ir.TensorProtocol | None:
    tensor, array = constant_tensor(value), constant_array(value, _MOST_ELEMENTS)
    if tensor is None or array is None or tensor.dtype == ir.DataType.STRING:
        return None
    return ir.tensor(np.array(array), tensor.dtype)


def _content(tensor: ir.TensorProtocol) -> tuple[ir.DataType, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()


def _embed(function: ir.Function, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Has the nodes of a function read a constant in the place of an input."""
    taken = {output.name for node in function.all_nodes() for output in node.outputs} | {item.name for item in function.inputs}
    name = next(name for number in itertools.count() if (name := f"{value.name}/constant{number or ''}") not in taken)
    output = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype))
    node = ir.node("Constant", [], {"value": ir.AttrTensor("value", tensor)}, outputs=[output])
    value.replace_all_uses_with(output)
    function.insert_before(function[0], node)
