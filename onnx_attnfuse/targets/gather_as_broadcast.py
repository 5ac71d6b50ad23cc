"""Masks whose elements a source picks one by one, made of the data as it lies.

PyTorch's exporter writes `mask[b, j]` for all b and j as a GatherND, whose indices have an element for each row and key. Every
element is taken in its place, so the data can be broadcast instead, and (b, 1, 1, t) shows whether a row has a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves, length, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, is_short, upward
from onnx_attnfuse.attention.masks.classify import element
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import position, value_of
from onnx_attnfuse.certify.terms import TRUE, Term
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, GATHERS, REARRANGES, REPEATS, is_standard
from onnx_attnfuse.graph.sizes import Dim

_VIEWS = (REARRANGES | REPEATS) - {"Flatten", "Reshape", "Tile"}
"""Views that keep axes whole: those left out may split an axis of the attention, and so of every mask that is laid out by it."""


class DataLayout:
    """Writes masks of one graph as their data lies."""

    def __init__(self, builder: Builder, reader: Reader) -> None:
        self._builder = builder
        self._reader = reader
        self._picked: dict[ir.Value, bool] = {}

    def of(self, indexed: IndexedValue) -> IndexedValue:
        """A value equal to another at every place, with as little as possible picked element by element; else that one itself."""
        node = indexed.value.producer()
        if node is None or not self._is_picked(indexed.value):
            return indexed
        if node.op_type in GATHERS:
            return self._unpicked(indexed, node) or indexed
        if node.op_type in _VIEWS:
            return self._rearranged(indexed) or indexed
        return self._remade(indexed, node) or indexed

    def _is_picked(self, value: ir.Value) -> bool:
        """Whether it is picked, or made of something that is, place by place."""
        known = self._picked.get(value)
        if known is None:
            node = value.producer()
            known = is_standard(node) and (
                node.op_type in GATHERS or (_is_by_place(node) and any(map(self._is_picked, filter(None, node.inputs))))
            )
            self._picked[value] = known
        return known

    def _unpicked(self, indexed: IndexedValue, node: ir.Node) -> IndexedValue | None:
        """The data, or the value that it is a view of, if it is taken in its place."""
        data, at = node.inputs[0], tuple(map(position, indexed.axes))
        every = not is_short(indexed, self._reader.facts)
        while data is not None:
            found = self._reader.ending(data).element(indexed.value, at)
            laid = None
            if found.op == "element" and value_of(found) is data:
                laid = laid_out(self._builder, found, indexed.axes, is_long=every)
            if laid is not None:
                return self.of(laid)
            view = data.producer()
            data = view.inputs[0] if is_standard(view) and view.op_type in REARRANGES else None
        return None

    def _rearranged(self, indexed: IndexedValue) -> IndexedValue | None:
        """A view, taken of the data, and no more repeated than that is."""
        source = upward(indexed, self._reader.facts, selecting=True)
        found = None if source is None else self.of(source)
        if found is None or found is source:
            return None
        present = {leaf for axis in refined(found.axes) for leaf in axis}
        axes = tuple(axis if present & set(axis) else () for axis in refined(indexed.axes))
        return IndexedValue(arrange(self._builder, found, axes), axes)

    def _remade(self, indexed: IndexedValue, node: ir.Node) -> IndexedValue | None:
        """The operator again, of the data; an And without operands that are true everywhere."""
        facts, dtype = self._reader.facts, self._reader.facts.dtype(node.outputs[0])
        operands = [aligned(value, indexed.axes, facts) for value in node.inputs]
        given = [item for item in operands if item is not None]
        found = list(map(self.of, given))
        if len(given) < len(operands) or found == given or dtype is None:
            return None
        if node.op_type == "And":
            found = [item for item in found if element(item, self._reader) is not TRUE] or found[:1]
        if node.op_type == "And" and len(found) == 1:
            return found[0]
        values, axes = [item.value for item in found], _union([item.axes for item in found])
        if node.op_type in CASTS:
            return IndexedValue(self._builder.cast(values[0], dtype), axes)
        return IndexedValue(self._builder.elementwise(node.op_type, values), axes)


def laid_out(builder: Builder, picked: Term, axes: Sequence[Axis], *, is_long: bool = False) -> IndexedValue | None:
    """A picked element as data laid out along some axes, from the first element on; None if it is not taken in their order.

    Axes of the data that are 1 long may be anywhere between; an axis that the data lacks is 1 long in the result.

    Args:
        builder: The builder of the layout.
        picked: The data, and where it is picked.
        axes: The axes of the result.
        is_long: The source picks an element for every place, and fails where there is none: no size has to tell that.
    """
    value, places = value_of(picked), [position(axis) for axis in axes]
    dims = builder.facts.dims(value)
    if dims is None:
        return None
    shape: list[Dim] = [1] * len(axes)
    order: list[int] = []
    for place, dim in enumerate(dims):
        if dim == 1:
            continue
        axis = next((axis for axis, form in enumerate(places) if axes[axis] and picked.args[place] is form), None)
        if axis is None:
            return None
        size = length(axes[axis])
        if dim != size:
            if not is_long and sizes.least(dim - size) < 0:
                return None
            value = builder.slice(value, place, 0, size)
        order.append(axis)
        shape[axis] = size
    if order != sorted(set(order)):
        return None
    return IndexedValue(builder.reshape(value, shape), tuple(leaves(axis) if at in order else () for at, axis in enumerate(axes)))


def _is_by_place(node: ir.Node) -> bool:
    """Whether an operator that has no attribute, or a Cast or a view, makes each element of those at one place."""
    return node.op_type in _VIEWS | CASTS or (node.op_type in ELEMENTWISE and not node.attributes)


def _union(each: Sequence[Axes]) -> Axes:
    """The axes of a broadcast of several values."""
    rank = max(map(len, each))
    joined: list[Axis] = [()] * rank
    for axes in each:
        for place, axis in enumerate(axes, rank - len(axes)):
            joined[place] = joined[place] or axis
    return tuple(joined)
