"""Which channels of a value are equal whatever the data is, proven by following what they are computed from.

    named = columns_in(facts).of(indexed, count, labels)
    named.names[3] == named.names[35]      # channels 3 and 35 are equal, up to their signs

Cosines are usually taken of angles that were put next to themselves, so the proof goes up through Cos, scalings and the Concat
until both channels are one channel of one value; columns of constants are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.channels import ChannelIndex, channels_of, joined, pulled
from onnx_attnfuse.attention.axes.factors import Axis, Factor
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of

_MAX_COLUMN_CHAIN = 32
_MAX_COMPARED_ELEMENTS = 1 << 22
"""Elements of a constant whose columns are compared."""
_EVEN = frozenset(["Cos"])
_ODD = frozenset(["Cast", "Div", "Mul", "Neg", "Sin"])
"""Operators whose result changes its sign with that of each operand."""
_ELEMENTWISE = frozenset("Add Cast Cos Div Exp Mul Neg Pow Reciprocal Sin Sqrt Sub Where".split())
_ROWS = Factor(0)
"""The rows of a table that are taken, whichever they are."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A name and a sign for each lane: those of the same name are equal up to their signs."""

    names: Array
    signs: Array


Labels = Mapping[Factor, int]
"""A number for each factor that is no channel, so that layers that only differ in their factors have the same names."""


def columns_in(facts: Facts) -> Columns:
    """The one of a graph, which remembers what it named: layers share their tables."""
    return facts.once("columns", lambda: Columns(facts))


class Columns:
    """Names what each channel of a value is."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._names: dict[Hashable, int] = {}
        self._known: dict[tuple[ir.Value, int, Hashable], Named] = {}

    def of(self, indexed: IndexedValue, count: int, labels: Labels, depth: int = 0) -> Named:
        """Names for `count` lanes of a value; names compare between all that are given with the same labels."""
        indexed = IndexedValue(indexed.value, joined(indexed.axes))
        key = indexed.value, count, _key(indexed.axes, labels, with_places=True)
        if key not in self._known:
            found: Named | None = None
            if depth < _MAX_COLUMN_CHAIN:
                found = self._moved(indexed, count, labels, depth) or self._computed(indexed, count, labels, depth)
            self._known[key] = found or self._constant(indexed, count, labels) or self._itself(indexed, count, labels)
        return self._known[key]

    def _name(self, key: Hashable) -> int:
        return self._names.setdefault(key, len(self._names))

    def _moved(self, indexed: IndexedValue, count: int, labels: Labels, depth: int) -> Named | None:
        """Names of channels that views, slices and concatenations only move."""
        parts = pulled(indexed, self._facts)
        if parts is None:
            return None
        if len(parts) == 1 and parts[0].chosen is None:
            return self.of(parts[0].indexed, count, labels, depth + 1)
        names, signs = np.empty(count, np.int64), np.empty(count, np.int64)
        for part in parts:
            assert part.chosen is not None
            found = self.of(part.indexed, len(part.chosen), labels, depth + 1)
            names[part.chosen], signs[part.chosen] = found.names, found.signs
        return Named(names, signs)

    def _computed(self, indexed: IndexedValue, count: int, labels: Labels, depth: int) -> Named | None:
        """Names of the channels of an operator's result: equal channels of the operands make equal channels."""
        node = indexed.value.producer()
        if not is_standard(node) or not channels_of(indexed.axes):
            return None
        rule = {"Gather": self._rows, "Slice": self._part}.get(node.op_type, self._elements)
        operands = rule(node, indexed)
        if operands is None:
            return None
        found = [self.of(operand, count, labels, depth + 1) for operand in operands]
        dtype = self._facts.dtype(indexed.value)
        signs: Array = np.ones(count, np.int64)
        rows = [item.names.tolist() for item in found]
        if node.op_type in _ODD and dtype is not None and dtype.is_floating_point():
            for item in found:
                signs = signs * item.signs
            if node.op_type == "Neg":
                return Named(found[0].names, -signs)
        elif node.op_type not in _EVEN:
            rows += [item.signs.tolist() for item in found]
        kind = node if node.op_type == "Slice" else (node.op_type, attribute(node, "to"), attribute(node, "axis"))
        return Named(np.asarray([self._name((kind, *row)) for row in zip(*rows, strict=True)]), signs)

    def _elements(self, node: ir.Node, indexed: IndexedValue) -> list[IndexedValue] | None:
        if node.op_type not in _ELEMENTWISE:
            return None
        operands: list[IndexedValue] = []
        for value in node.inputs:
            axes = None if value is None else aligned(value, indexed.axes, self._facts)
            if value is None or axes is None:
                return None
            operands.append(IndexedValue(value, axes))
        return operands

    def _rows(self, node: ir.Node, indexed: IndexedValue) -> list[IndexedValue] | None:
        """A table, and the places of the rows that are taken of it."""
        table, index = node.inputs[0], node.inputs[1]
        rank = None if index is None else self._facts.rank(index)
        axis: int = attribute(node, "axis", 0)
        if table is None or index is None or rank is None or axis < 0 or channels_of(indexed.axes[axis : axis + rank]):
            return None
        axes = indexed.axes[axis : axis + rank]
        return [IndexedValue(table, (*indexed.axes[:axis], (_ROWS,), *indexed.axes[axis + rank :])), IndexedValue(index, axes)]

    def _part(self, node: ir.Node, indexed: IndexedValue) -> list[IndexedValue] | None:
        """The table that a Slice cuts rows out of."""
        table = node.inputs[0]
        cut = axes_of(node, 3, len(indexed.axes), self._facts)
        if table is None or cut is None or any(channels_of((indexed.axes[index],)) for index in cut):
            return None
        return [IndexedValue(table, tuple((_ROWS,) if index in cut else axis for index, axis in enumerate(indexed.axes)))]

    def _constant(self, indexed: IndexedValue, count: int, labels: Labels) -> Named | None:
        """Columns of equal numbers."""
        array = constant_array(indexed.value, limit=_MAX_COMPARED_ELEMENTS)
        held = [index for index, axis in enumerate(indexed.axes) if channels_of((axis,))]
        if array is None or array.size == 0 or any(len(indexed.axes[index]) > 1 for index in held):
            return None
        others = [index for index in range(array.ndim) if index not in held]
        places = tuple(lanes.places for lanes in channels_of(indexed.axes))
        numbers: Array = np.asarray(array if array.dtype.kind in "iu" else array.astype(np.float64))
        taken = cast("Array", numbers.transpose([*held, *others])[places])
        columns = np.broadcast_to(taken, (count, *(array.shape[index] for index in others))).reshape(count, -1)
        leading = columns[np.arange(count), (columns != 0).argmax(axis=1)]
        signs: Array = np.where(leading < 0, -1, 1)
        where = _key([indexed.axes[index] for index in others if indexed.axes[index]], labels, with_places=False)
        return Named(np.asarray([self._name((where, column.tobytes())) for column in columns * signs[:, None] + 0]), signs)

    def _itself(self, indexed: IndexedValue, count: int, labels: Labels) -> Named:
        """Channels of a value of which nothing else is known."""
        where = indexed.value, _key(indexed.axes, labels, with_places=False)
        places = [np.broadcast_to(lanes.places, (count,)).tolist() for lanes in channels_of(indexed.axes)]
        keys = zip(*places, strict=True) if places else [()] * count
        return Named(np.asarray([self._name((where, key)) for key in keys]), np.ones(count, np.int64))


def _key(axes: Sequence[Axis], labels: Labels, *, with_places: bool) -> Hashable:
    """Which factors each axis runs over."""
    return tuple(
        tuple(
            (leaf.places.tobytes() if with_places else leaf.size)
            if isinstance(leaf, ChannelIndex)
            else labels.get(leaf, (leaf.serial,))
            for leaf in axis
        )
        for axis in axes
    )
