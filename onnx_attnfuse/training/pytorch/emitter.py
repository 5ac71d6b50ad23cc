"""An ONNX graph that grows along a run on fake tensors: a value for each tensor, a node for each operator."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

OPSET = 18
APART = "apart"
"""The operator of a tensor in which a gradient ends."""
DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.bool: ir.DataType.BOOL,
    torch.uint8: ir.DataType.UINT8,
    torch.int8: ir.DataType.INT8,
    torch.int16: ir.DataType.INT16,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
}
"""Element types that ONNX has, too."""


def without_modes() -> contextlib.AbstractContextManager[object]:
    """Tensors are what they are inside of the block, whatever fakes and records them around it."""
    modes: Any = importlib.import_module("torch.utils._python_dispatch")
    return modes._disable_current_modes()


class Emitter:
    """The nodes and values of a graph that is being written down."""

    def __init__(self) -> None:
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []
        self._numbers: dict[object, ir.Value] = {}
        self._lengths: dict[str, tuple[ir.Value, int]] = {}
        """For a symbol a value, and the axis of it that is so long."""
        self._vectors: dict[str, ir.Value] = {}
        """For an expression of lengths its value."""

    def fresh(self, name: str) -> str:
        """A name that no other value has."""
        return f"{name}_{len(self.nodes) + len(self.inputs) + len(self.constants)}"

    def leaf(self, tensor: torch.Tensor, name: str) -> ir.Value:
        """A value that nothing is known of but its shape and type: an input of the graph."""
        value = ir.Value(name=self.fresh(name))
        self.describe(value, tensor)
        self.inputs.append(value)
        return value

    def describe(self, value: ir.Value, tensor: torch.Tensor) -> None:
        """Notes the shape and type of a tensor with its value."""
        if tensor.dtype in DTYPES:
            value.dtype = DTYPES[tensor.dtype]
        value.shape = ir.Shape([_dim(size) for size in tensor.shape])
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int) and size.value is not None:
                self._lengths.setdefault(size.value, (value, axis))

    def constant(self, array: np.ndarray[Any, Any], name: str = "constant", dtype: ir.DataType | None = None) -> ir.Value:
        """A constant."""
        value = ir.Value(name=self.fresh(name))
        value.const_value = ir.tensor(array, dtype=dtype, name=value.name)
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(array.shape)
        self.constants.append(value)
        return value

    def number(self, number: float, dtype: ir.DataType) -> ir.Value:
        """A number as a tensor of rank 0."""
        key = number, type(number), dtype
        if str(key) not in self._numbers:
            tensor = ir.tensor(np.asarray(number, dtype.numpy()), dtype=dtype)
            self._numbers[str(key)] = self.constant(tensor.numpy(), "number", dtype)
        return self._numbers[str(key)]

    def whole(self, numbers: Sequence[int]) -> ir.Value:
        """A list of integers that are known now."""
        key = tuple(numbers)
        if key not in self._numbers:
            self._numbers[key] = self.constant(np.asarray(numbers, np.int64), "whole")
        return self._numbers[key]

    def shape(self, dims: Sequence[Any]) -> ir.Value:
        """A shape as a tensor of rank 1."""
        if all(isinstance(_dim(dim), int) for dim in dims):
            return self.whole([int(dim) for dim in dims])
        return self.op("Concat", [self._vector(dim) for dim in dims], {"axis": 0}, dtype=ir.DataType.INT64)

    def size(self, dim: Any) -> ir.Value:
        """A length as a tensor of rank 0."""
        if isinstance(_dim(dim), int):
            return self.number(int(dim), ir.DataType.INT64)
        return self.op("Squeeze", [self._vector(dim), self.whole([0])], dtype=ir.DataType.INT64)

    def _vector(self, dim: Any) -> ir.Value:
        known = _dim(dim)
        if isinstance(known, int):
            return self.whole([known])
        if known not in self._vectors:
            self._vectors[known] = self._computed(dim.node.expr)
        return self._vectors[known]

    def _computed(self, expression: Any) -> ir.Value:
        """A tensor of one integer, computed as an expression of lengths says."""
        if expression.is_Integer:
            return self.whole([int(expression)])
        found = self._lengths.get(str(expression))
        if found is not None:
            value, axis = found
            shape = self.op("Shape", [value], dtype=ir.DataType.INT64)
            return self.op("Gather", [shape, self.whole([axis])], {"axis": 0}, dtype=ir.DataType.INT64)
        name = "Add" if expression.is_Add else "Mul" if expression.is_Mul else None
        if name is None:
            return self._unknown()
        total, *rest = [self._computed(part) for part in expression.args]
        for part in rest:
            total = self.op(name, [total, part], dtype=ir.DataType.INT64)
        return total

    def _unknown(self) -> ir.Value:
        value = ir.Value(name=self.fresh("length"), shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
        self.inputs.append(value)
        return value

    def op(
        self,
        name: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any] | None = None,
        like: torch.Tensor | None = None,
        *,
        dtype: ir.DataType | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Adds a node with one output.

        Args:
            name: The operator.
            inputs: Its inputs.
            attributes: Its attributes.
            like: The tensor that the output is.
            dtype: The output's type, where no tensor tells it.
            domain: The operator's domain; `aten` for operators without a counterpart.
        """
        node = ir.node(name, list(inputs), attributes or {}, domain=domain, name=self.fresh(name))
        output = node.outputs[0]
        output.name = node.name
        if dtype is not None:
            output.dtype = dtype
        if like is not None:
            self.describe(output, like)
        self.nodes.append(node)
        return output

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """A value in another type; itself where it has that already."""
        if dtype is None or value.dtype == dtype:
            return value
        found = self.op("Cast", [value], {"to": dtype.value}, dtype=dtype)
        found.shape = value.shape
        return found

    def graph(self, outputs: Sequence[ir.Value]) -> ir.Graph:
        """The graph so far, without unused nodes."""
        wanted, kept_nodes = set(outputs), list[ir.Node]()
        for node in reversed(self.nodes):
            if wanted.isdisjoint(node.outputs):
                for place in range(len(node.inputs)):
                    node.replace_input_with(place, None)
                continue
            wanted.update(value for value in node.inputs if value is not None)
            kept_nodes.append(node)
        self.nodes = kept_nodes[::-1]
        initializers = [value for value in self.constants if value.uses()]
        made = {output for node in self.nodes for output in node.outputs}
        kept = [value for value in dict.fromkeys(outputs) if value in made]
        return ir.Graph(
            self.inputs, kept, nodes=self.nodes, initializers=initializers, opset_imports={"": OPSET, "aten": 1}, name="captured"
        )


def _dim(size: Any) -> int | str:
    """A length: the number, or the expression that it is made of."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else str(expression)
