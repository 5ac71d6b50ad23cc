"""Buffers of a module as constants: ORTModule makes inputs of them, of which a reader can only say that they are arbitrary.

A triangle in a buffer is read as causal only if its content is known. So the content is known while a graph is read, and what a
fused attention owes to it is told, so that a step with other content is no step of that graph (`graphs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.constants import Array


class Buffers:
    """The buffers among the inputs of a graph, with initializers in their place while it is read."""

    def __init__(self, graph: ir.Graph, contents: Mapping[str, Array]) -> None:
        """Puts the initializers in.

        Args:
            graph: The graph.
            contents: By the names of inputs, what they hold in every step.
        """
        self._graph = graph
        self._inputs: dict[ir.Value, ir.Value] = {}
        for value in graph.inputs:
            array = contents.get(value.name or "")
            if array is None:
                continue
            constant = ir.Value(name=f"{value.name}/constant", const_value=ir.tensor(array))
            constant.type, constant.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            graph.register_initializer(constant)
            value.replace_all_uses_with(constant)
            self._inputs[constant] = value

    def behind(self, spec: AttentionSpec) -> tuple[str, ...]:
        """The names of buffers whose content an attention was read with."""
        operands = {source.indexed.value for operand in spec.operands() for source in operand}
        found = [*spec.values(), *(value for node in spec.nodes for value in node.inputs if value is not None)]
        pending = [value for value in found if value not in operands]
        seen: set[ir.Value] = set()
        while pending:
            value = pending.pop()
            if value in seen or value in operands:
                continue
            seen.add(value)
            node = value.producer()
            if node is not None and node.op_type != "Shape":
                pending += _given(node.inputs)
        return tuple(sorted(value.name or "" for constant, value in self._inputs.items() if constant in seen))

    def restore(self) -> None:
        """Makes inputs of them again."""
        for constant, value in self._inputs.items():
            constant.replace_all_uses_with(value)
            self._graph.initializers.pop(constant.name or "", None)
        self._inputs.clear()


def _given(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    return [value for value in values if value is not None]
