"""Which values of a graph are views of one value, and how each of them lies.

A gradient graph takes the operands of the attention again, some of them transposed once more. Two values are the same tensor if
both are views of one; how a view lies follows from the factors of the value's axes.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, upward
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts

_MAX_VIEW_CHAIN = 24


def over(indexed: IndexedValue, facts: Facts) -> IndexedValue | None:
    """The value that `indexed` is a view of, or was before it was converted to another float type; None if it is neither."""
    node = indexed.value.producer()
    if is_standard(node, "Cast") and node.inputs[0] is not None and facts.dtype(node.inputs[0]) in FLOATS:
        return IndexedValue(node.inputs[0], indexed.axes)
    return upward(indexed, facts)


def under(node: ir.Node, axes: Axes, facts: Facts) -> IndexedValue | None:
    """The output of a view, or of a conversion between float types, of an input that lies as `axes`; None of other nodes."""
    if is_standard(node, "Cast") and facts.dtype(node.outputs[0]) in FLOATS:
        return IndexedValue(node.outputs[0], axes)
    return downward(node, axes, facts)


class Views:
    """The views of one value."""

    def __init__(self, indexed: IndexedValue, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[ir.Value, Axes | None] = {}
        above: IndexedValue | None = indexed
        while above is not None and len(self._known) < _MAX_VIEW_CHAIN:
            self._known[above.value] = above.axes
            above = over(above, facts)

    def axes_of(self, value: ir.Value | None, depth: int = 0) -> Axes | None:
        """How `value` lies, or None if it is no view of that value."""
        if value is None or depth > _MAX_VIEW_CHAIN:
            return None
        if value not in self._known:
            self._known[value] = self._below(value, depth)
        return self._known[value]

    def _below(self, value: ir.Value, depth: int) -> Axes | None:
        node = value.producer()
        inner = None if node is None or not node.inputs else self.axes_of(node.inputs[0], depth + 1)
        if node is None or inner is None:
            return None
        found = under(node, inner, self._facts)
        return None if found is None or found.value is not value else found.axes
