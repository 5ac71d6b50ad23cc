"""Graphs written in Python, operator by operator: for tests of one thing in many spellings."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import onnx

from tests.support.bundled import Array

Operand: TypeAlias = str | int | float | list[int] | Array
"""The name of a value, or a constant: integers are int64."""


class GraphBuilder:
    """A graph that is being written."""

    def __init__(self, opset: int = 18) -> None:
        self._opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def given(self, name: str, dims: list[str | int], dtype: int = onnx.TensorProto.FLOAT) -> str:
        """An input."""
        self._inputs.append(onnx.helper.make_tensor_value_info(name, dtype, dims))
        return name

    def op(self, kind: str, *operands: Operand | None, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """The output of an operator, or all of them if there are several."""
        names = [f"{kind}_{len(self._nodes)}_{index}" for index in range(outputs)]
        inputs = [
            "" if operand is None else operand if isinstance(operand, str) else self._constant(operand) for operand in operands
        ]
        self._nodes.append(onnx.helper.make_node(kind, inputs, names, name=names[0], domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def _constant(self, content: int | float | list[int] | Array) -> str:
        name = f"constant_{len(self._constants)}"
        array = np.asarray(content, np.float32) if isinstance(content, float) else np.asarray(content)
        self._constants.append(onnx.numpy_helper.from_array(array, name))
        return name

    def slice(self, value: str, axis: int, start: int, end: int, step: int = 1) -> str:
        """`value[start:end:step]` along an axis."""
        return self.op("Slice", value, [start], [end], [axis], [step])

    def gives(self, value: str, name: str, dims: list[str | int], dtype: int = onnx.TensorProto.FLOAT) -> None:
        """Makes a value an output."""
        self._nodes.append(onnx.helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(onnx.helper.make_tensor_value_info(name, dtype, dims))

    def model(self) -> onnx.ModelProto:
        """What was written."""
        graph = onnx.helper.make_graph(self._nodes, "written", self._inputs, self._outputs, self._constants)
        opsets = [onnx.helper.make_opsetid("", self._opset), onnx.helper.make_opsetid("com.microsoft", 1)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
