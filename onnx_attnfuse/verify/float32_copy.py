"""Whole models in float32 in the place of half types, so that small differences show, and on a CPU that lacks the kernels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import subgraphs
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.tensors import Computed, bodies
from onnx_attnfuse.verify.submodel import widened_attribute

_LARGE = 1 << 28
"""Bytes of weights above which a model is run in fewer loops."""


def is_half(model: ir.Model) -> bool:
    """Whether something of a model is computed in a half type."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    return any(value.dtype in HALVES for value in values)


def weight_bytes(model: ir.Model) -> int:
    """The bytes of all weights."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def is_large(model: ir.Model) -> bool:
    """Whether a model has so many weights that it is run in fewer loops."""
    return weight_bytes(model) > _LARGE


def widened(model: ir.Model) -> ir.Model:
    """A copy of the model that computes in float32 instead of a half type; weights are widened when they are read."""
    copy = model.clone()
    graphs = list(bodies(copy))
    for graph in graphs:
        graphs += [inner for node in graph for inner in subgraphs(node)]
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in HALVES:
                value.const_value = _widened_when_read(value.const_value)
        for value in (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)):
            if value.dtype in HALVES:
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                node.attributes[name] = widened_attribute(attribute, _wide)
    return copy


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widened_when_read(tensor: ir.TensorProtocol) -> Computed:
    shape = ir.Shape(tensor.shape.numpy())
    return Computed(lambda: tensor.numpy().astype(np.float32), (tensor,), ir.DataType.FLOAT, shape, tensor.name or "")
