"""Values as they are computed position by position from some others: read once, and computed again for other positions.

expansion = Expansion(builder, whole, begins); expansion.read(value, marks); expansion.computed(value, {beginning: new})

So are keys and values of a cache of something else, and cosines and sines of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.packing.tokenwise import Step, read_step
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.uses import is_fed, label, producer_of, sources
from onnx_attnfuse.reasons import Reason, Refused

_KEEPS = REARRANGES | REPEATS | SLICES
"""Operators whose other inputs are sizes and places, which a step writes anew."""
_LINEAR = _KEEPS | {"Concat", "MatMul"}
"""Operators that multiply what they are given by constants, and add up."""


class Expansion:
    """How values are computed.

    Args:
        builder: The builder.
        whole: The positions of the values.
        begins: Whether a value with its marks is one that they are computed from.
    """

    def __init__(self, builder: Builder, whole: Tokens, begins: Callable[[ir.Value, Marks], bool]) -> None:
        self._builder, self.whole, self._begins = builder, whole, begins
        self._steps: dict[ir.Node, Step] = {}
        self.beginnings: dict[ir.Value, Marks] = {}
        """The values that they are computed from."""

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """The nodes from the beginnings to the values."""
        return tuple(self._steps)

    @property
    def is_linear(self) -> bool:
        """Whether a value is the product of its beginnings with constants."""
        return all(is_standard(node, *_LINEAR) for node in self._steps)

    def read(self, value: ir.Value, marks: Marks) -> None:
        """Reads how a value is computed.

        Raises:
            Refused: It is computed from something else too, or not position by position.
        """
        node = value.producer()
        if self._begins(value, marks):
            self.beginnings[value] = marks
            return
        marks = marks[len(marks) - (self._builder.facts.rank(value) or 0) :]
        if node is None or not {"b", "s"} <= {*"".join(marks)}:
            raise Refused(
                "cache-kept", f"keys or values are computed from '{value.name}' besides a cache", label(node) if node else None
            )
        if node in self._steps:
            return
        step = read_step(node, value, marks, self.whole)
        if isinstance(step, Reason):
            message = f"keys or values are not computed from a cache position by position, as {step.message}"
            raise Refused("cache-kept", message, label(node))
        free = () if is_standard(node, *_KEEPS) else step.free()
        other = next((item for item in sources(free) if is_fed(item)), None)
        if other is not None:
            raise Refused("cache-kept", f"keys or values are computed from '{other.name}' besides a cache", label(node))
        self._steps[node] = step
        for item, own in step.inputs():
            self.read(item, own)

    def computed(self, value: ir.Value, given: dict[ir.Value, ir.Value]) -> ir.Value:
        """A value for other positions, all of them in one axis in front of its channels.

        Args:
            value: A value that was read.
            given: The same positions of the beginnings, likewise; takes up what is computed.
        """
        if value not in given:
            step = self._steps[producer_of(value)]
            operands = [self.computed(item, given) for item, _ in step.inputs()]
            given.update(zip(step.node.outputs, step.on_packed(self._builder, operands), strict=False))
        return given[value]
