"""Decoders that get another interface, by nodes in front of their inputs and behind their outputs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import onnx

Dims = list[str | int]


class Interface:
    """A decoder that gets another interface, by nodes in front of its inputs and behind its outputs."""

    def __init__(self, path: pathlib.Path) -> None:
        self.model = onnx.load(path)
        self._graph = self.model.graph
        self._front: list[onnx.NodeProto] = []
        self.pasts = [item for item in self._graph.input if len(item.type.tensor_type.shape.dim) == 4]
        self.presents = [item for item in self._graph.output if len(item.type.tensor_type.shape.dim) == 4]

    @staticmethod
    def dims(item: onnx.ValueInfoProto) -> Dims:
        return [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]

    def number(self, name: str, *numbers: int) -> str:
        self._graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(numbers)], numbers))
        return name

    def node(self, op: str, inputs: list[str], output: str, front: bool = True, **attributes: object) -> None:
        node = onnx.helper.make_node(op, inputs, [output], **attributes)
        (self._front if front else self._graph.node).append(node)

    def replace(self, old: list[onnx.ValueInfoProto], name: str, dims: Dims, dtype: int = onnx.TensorProto.FLOAT) -> None:
        """One input or output in the place of others."""
        held = self._graph.input if old[0] in self._graph.input else self._graph.output
        new = onnx.helper.make_tensor_value_info(name, dtype, dims)
        kept = [item for item in held if item not in old]
        place = list(held).index(old[0])
        del held[:]
        held.extend([*kept[:place], new, *kept[place:]])

    def done(self) -> onnx.ModelProto:
        rest = list(self._graph.node)
        del self._graph.node[:]
        self._graph.node.extend([*self._front, *rest])
        onnx.checker.check_model(self.model)
        return self.model


def turned(*perm: int) -> Callable[[pathlib.Path], onnx.ModelProto]:
    """Every cache transposed."""

    def change(path: pathlib.Path) -> onnx.ModelProto:
        made, back = Interface(path), [perm.index(axis) for axis in range(4)]
        for item in (*made.pasts, *made.presents):
            front, name = item in made.pasts, f"{item.name}_turned"
            made.replace([item], name, [made.dims(item)[axis] for axis in perm])
            read, written = (name, item.name) if front else (item.name, name)
            made.node("Transpose", [read], written, front, perm=back if front else perm)
        return made.done()

    return change
