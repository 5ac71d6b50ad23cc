"""Keys and values as they are computed from a cache, position by position: read once, and computed again for other positions.

expansion = Expansion(builder, whole, grown); expansion.read(value, marks); expansion.computed(value, {appended: new})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.packing.tokenwise import Step, read_step
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.uses import is_fed, label, sources
from onnx_attnfuse.reasons import Reason, Refused

_KEEPS = REARRANGES | REPEATS | SLICES
"""Operators whose other inputs are sizes and places, which a step writes anew."""
_LINEAR = _KEEPS | {"Concat", "MatMul"}
"""Operators that multiply what they are given by constants, and add up."""


class Expansion:
    """How values are computed from what new positions are appended to.

    Args:
        builder: The builder.
        whole: The positions of the values, earlier and new ones.
        grown: The outputs of the model that new positions are appended to an input for, with the nodes that do.
    """

    def __init__(self, builder: Builder, whole: Tokens, grown: Mapping[ir.Value, ir.Node]) -> None:
        self._builder, self.whole, self._grown = builder, whole, grown
        self._steps: dict[ir.Node, Step] = {}
        self.appended: dict[ir.Value, Marks] = {}
        """The outputs that the values are computed from."""

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """The nodes from what is appended to the values."""
        return tuple(self._steps)

    @property
    def is_linear(self) -> bool:
        """Whether a value is the product of what is appended with constants."""
        return all(is_standard(node, *_LINEAR) for node in self._steps)

    def read(self, value: ir.Value, marks: Marks) -> None:
        """Reads how a value is computed.

        Raises:
            Refused: It is computed from something else too, or not position by position.
        """
        appends, node = self._grown.get(value), value.producer()
        if appends is not None and marks[attribute(appends, "axis", 0)] == "s" and "b" in marks:
            self.appended[value] = marks
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

    def computed(self, value: ir.Value, given: Mapping[ir.Value, ir.Value]) -> ir.Value:
        """A value for other positions, all of them in one axis in front of its channels.

        Args:
            value: A value that was read.
            given: The same positions of what is appended, likewise.
        """
        if value in given:
            return given[value]
        node = value.producer()
        assert node is not None
        step = self._steps[node]
        operands = [self.computed(item, given) for item, _ in step.inputs()]
        return step.on_packed(self._builder, operands)[node.outputs.index(value)]
