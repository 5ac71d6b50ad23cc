"""A piece whose lengths are fixed and too large to be run, as a piece of the same structure with a shorter axis.

A length in the shapes of inputs is replaced everywhere by a small one: in these shapes, in whole multiples of it, in integer
constants, in attributes, and constant tables are cut. The smaller piece is a graph of its own with facts of its own. Where its
numbers do not fit together any more the original does not run, and nothing is said to be equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.assumptions import Assumed
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_tensor, read_tensor, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.verify.subgraph import Subgraph

_FEW = 24
"""The length of the longest axis after shortening, the next one to a third more, and so on, so that no two become
equal; above the largest number of the piece that an axis reaches."""
_LONG = 256
"""The least length that is shortened; heads, channels of a head and groups have fewer."""
_LISTED = 64
"""Integer constants of at most this many elements are shapes and bounds, in which the length is looked for."""


def smaller(subgraph: Subgraph, assumed: Assumed) -> Iterator[tuple[int, Subgraph, Facts]]:
    """For each long axis, longest first, its length and the piece with this and the longer ones shortened."""
    lengths = {dim for item in subgraph.inputs for dim in item.dims if isinstance(dim, int) and dim >= _LONG}
    if any(list(subgraphs(node)) for node in subgraph.nodes):
        return
    bounds = _numbers(subgraph)
    for place, length in enumerate(sorted(lengths, reverse=True), 3):
        few = place * _FEW // 3 + max((number for number in bounds if number < length), default=0)
        if few < length:
            subgraph, facts = _Shortened(length, few).of(subgraph, assumed)
            yield length, subgraph, facts


def _numbers(subgraph: Subgraph) -> set[int]:
    """The single whole numbers of a piece, as windows and offsets are: an axis that ends before one shows nothing of it."""
    tensors = (constant_tensor(value) for value in subgraph.constants)
    arrays = (read_tensor(tensor) for tensor in tensors if tensor is not None and tensor.size == 1)
    found = [float(array.item()) for array in arrays if array is not None and array.dtype.kind in "iuf"]
    attributes = (item for node in subgraph.nodes for item in node.attributes.values())
    found += [item.as_int() for item in attributes if item.type == ir.AttributeType.INT]
    return {int(number) for number in found if math.isfinite(number) and number > 1}


class _Shortened:
    """One length of a piece replaced."""

    def __init__(self, length: int, few: int) -> None:
        self._length = length
        self._few = few
        self._values: dict[ir.Value, ir.Value] = {}

    def of(self, subgraph: Subgraph, assumed: Assumed) -> tuple[Subgraph, Facts]:
        inputs = [
            dataclasses.replace(item, value=self._value(item.value), dims=tuple(map(self._dim, item.dims)))
            for item in subgraph.inputs
        ]
        constants = [self._value(value) for value in subgraph.constants]
        nodes = [self._node(node) for node in subgraph.nodes]
        results = tuple(self._values[value] for value in subgraph.results)
        fed = [item.value for item in inputs if item.value.const_value is None]
        known = [(item.dims, item.dtype) for item in inputs if item.value.const_value is None]
        held = [item.value for item in inputs if item.value.const_value is not None]
        graph = ir.Graph(fed, list(dict.fromkeys(results)), nodes=nodes, initializers=[*held, *constants], name="smaller")
        return Subgraph(tuple(nodes), tuple(inputs), tuple(constants), results), Facts(graph, known, assumed)

    def _dim(self, dim: Dim) -> Dim:
        each = sizes.exact_quotient(dim, self._length)
        return dim if each is None or dim == 0 else each * self._few

    def _int(self, number: int) -> int:
        return number if number % self._length else number // self._length * self._few

    def _value(self, value: ir.Value) -> ir.Value:
        tensor = constant_tensor(value)
        copy = ir.Value(name=value.name, type=value.type)
        if tensor is not None:
            copy.const_value = self._tensor(tensor)
            copy.shape, copy.type = ir.Shape(copy.const_value.shape.numpy()), ir.TensorType(tensor.dtype)
        self._values[value] = copy
        return copy

    def _tensor(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        dims = tensor.shape.numpy()
        listed = tensor.size <= _LISTED and len(dims) < 2 and tensor.dtype in {ir.DataType.INT64, ir.DataType.INT32}
        cut = tuple(slice(self._int(dim)) for dim in dims)
        array = read_tensor(tensor) if listed or any(part.stop != dim for part, dim in zip(cut, dims, strict=True)) else None
        if array is None:
            return tensor
        array = array[cut]
        if listed:
            array = np.vectorize(self._int, otypes=[array.dtype])(array) if array.size else array
        return ir.tensor(np.ascontiguousarray(array).reshape(array.shape), dtype=tensor.dtype, name=tensor.name)

    def _node(self, node: ir.Node) -> ir.Node:
        inputs = [None if value is None else self._values[value] for value in node.inputs]
        attributes = [self._attribute(item) for item in node.attributes.values()]
        copy = ir.Node(
            node.domain, node.op_type, inputs, attributes, overload=node.overload, num_outputs=len(node.outputs), name=node.name
        )
        for value, output in zip(node.outputs, copy.outputs, strict=True):
            output.name, output.type = value.name, value.type
            self._values[value] = output
        return copy

    def _attribute(self, attribute: ir.Attr) -> ir.Attr:
        if attribute.type == ir.AttributeType.INTS:
            return ir.AttrInt64s(attribute.name, [self._int(number) for number in attribute.as_ints()])
        if attribute.type == ir.AttributeType.TENSOR:
            return ir.AttrTensor(attribute.name, self._tensor(attribute.as_tensor()))
        return attribute
