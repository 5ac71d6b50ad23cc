"""Rows of a sequence in blocks, and for each block the strip of keys that its rows may see: indices, tensors, masks.

Block `i` has rows `i·w` to `i·w + w - 1`, and its strip is `k` keys long, moved to lie inside the sequence. The last block is
filled up. Neither is longer than the sequence, whose length is known at run time only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, RESHAPES, is_standard
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_VIEWS = RESHAPES | {"Expand", "Identity"}
_RANK, _MANY = 4, 8


class Strips:
    """Blocks and strips of one attention; those of all that share a window are the same values."""

    def __init__(self, builder: Builder, batch: Dim, lengths: tuple[Dim, Dim], rows: int, reach: tuple[Dim, int]) -> None:
        """Computes which rows and keys go together.

        Args:
            builder: The builder.
            batch: The number of entries.
            lengths: The number of rows, and of keys.
            rows: The number of rows that a block of a long sequence has at most.
            reach: How far before its row the first key may be that the row sees, and how far from there the last.
        """
        back, width = reach
        self._builder, self._batch = builder, batch
        self._lengths = lengths
        wanted = sizes.floor_quotient(lengths[0] + (rows - 1), rows)
        several = sizes.floor_quotient(lengths[1] - 1, 2 * rows + width)  # 0 where strips would have nearly all keys
        self.count = sizes.minimum(wanted, several * _MANY + 1)
        """The number of blocks of an entry, which are about equally long."""
        self.rows = sizes.floor_quotient(lengths[0] + self.count - 1, self.count)
        self.keys = sizes.minimum(lengths[1], self.rows + width)
        self._filled = self.count * self.rows
        first = self._integer("Mul", builder.counting(self.count), builder.shape([self.rows]))
        last = self._integer("Sub", builder.shape([lengths[1]]), builder.shape([self.keys]))
        begin = self._integer("Min", self._integer("Sub", first, builder.shape([back])), last)
        begin = self._integer("Max", begin, builder.constant([0]))
        self._columns = self._grid(begin, self.keys)
        """(blocks, 1, k): the keys of each block."""
        taken = builder.transpose(self._grid(first, self.rows), [0, 2, 1])
        self._rows = self._integer("Min", taken, self._integer("Sub", builder.shape([lengths[0]]), builder.constant([1])))
        """(blocks, w, 1): its rows, the last one again where it is filled up."""
        self._known: dict[ir.Value, ir.Value] = {}

    def blocks(self, value: ir.Value) -> ir.Value:
        """(b, s, c) as (b·blocks, w, c)."""
        build, (batch, length, width) = self._builder, dims_of(self._builder, value)
        if self._filled != length:
            pads = build.shape([0, 0, 0, 0, self._filled - length, 0])
            value = build.node("Pad", [value, pads], dims=[batch, self._filled, width], dtype=build.facts.dtype(value))
        return build.reshape(value, [batch * self.count, self.rows, width])

    def whole(self, value: ir.Value) -> ir.Value:
        """(b·blocks, w, c) as (b, s, c)."""
        build, (_, _, width) = self._builder, dims_of(self._builder, value)
        value = build.reshape(value, [self._batch, self._filled, width])
        return value if self._filled == self._lengths[0] else build.slice(value, 1, 0, self._lengths[0])

    def line(self, value: ir.Value) -> ir.Value:
        """(b or 1, blocks, w) as (b or 1, s, 1)."""
        build, batch = self._builder, dims_of(self._builder, value)[0]
        value = build.reshape(value, [batch, self._filled, 1])
        return value if self._filled == self._lengths[0] else build.slice(value, 1, 0, self._lengths[0])

    def by_head(self, value: ir.Value, heads: int, group: int, size: int) -> ir.Value:
        """(b, t, n/group·h) as (b·blocks, n, k, h): every head with the strip of the one that `group` of them share."""
        build, wide = self._builder, [self._batch * self.count, heads, self.keys, size]
        flat = build.reshape(value, [self._batch * self._lengths[1] * (heads // group), size])
        entries = self._integer("Mul", build.counting(self._batch), build.shape([self._lengths[1]]))
        columns = build.reshape(self._columns, [1, self.count, 1, self.keys])
        places = self._integer("Add", build.reshape(entries, [self._batch, 1, 1, 1]), columns)
        places = self._integer("Mul", places, build.constant([heads // group]))
        places = self._integer("Add", places, build.constant((np.arange(heads) // group).reshape(1, 1, heads, 1)))
        places = build.reshape(places, wide[:3])
        return build.node("Gather", [flat, places], {"axis": 0})

    def mask(self, value: ir.Value) -> ir.Value:
        """(b or 1, n or 1, s, t) as (b or 1, n or 1, blocks, w, k).

        Raises:
            Refused: It is not as long as the scores.
        """
        dims = dims_of(self._builder, value)
        if len(dims) != _RANK or not all(map(self._builder.facts.same, dims[2:], self._lengths)):
            raise Refused("whole-window", f"'{value.name}' may not be as long as the scores along both axes")
        return self._builder.reshape(self._taken(value), [*dims[:2], self.count, self.rows, self.keys])

    def bias(self, value: ir.Value) -> ir.Value:
        """(b or 1, n or 1, s, t) as (b·blocks, n or 1, w, k).

        Raises:
            Refused: It is not as long as the scores.
        """
        build, taken = self._builder, self.mask(value)
        batch, heads, *rest = dims_of(build, taken)
        if batch != self._batch:
            taken = build.expand(taken, [self._batch, heads, *rest], [True, False, False, False, False])
        taken = taken if heads == 1 else build.transpose(taken, [0, 2, 1, 3, 4])
        return build.reshape(taken, [self._batch * self.count, heads, *rest[1:]])

    def _taken(self, value: ir.Value) -> ir.Value:
        """A tensor that broadcasts against the scores, at the rows and keys of all blocks: computed there, or picked."""
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = self._remade(value) or self._picked(value)
        return known

    def _remade(self, value: ir.Value) -> ir.Value | None:
        """The operator of a value of all rows and keys again, of its inputs at these."""
        build, node, dims = self._builder, value.producer(), dims_of(self._builder, value)
        if not is_standard(node) or self._spans(dims) != (True, True):
            return None
        if node.op_type in _VIEWS and node.inputs[0] is not None:
            found = build.facts.dims(node.inputs[0])
            return self._taken(node.inputs[0]) if found is not None and self._differ_in_front(found, dims) else None
        given = [item for item in node.inputs if item is not None]
        shapes = [build.facts.dims(item) for item in given]
        if not (node.op_type in ELEMENTWISE and not node.attributes) and node.op_type not in CASTS:
            return None
        if len(given) < len(node.inputs) or any(shape is None or self._spans(shape) is None for shape in shapes):
            return None
        taken = [self._taken(item) for item in given]
        dtype = build.facts.dtype(value)
        if node.op_type in CASTS:
            return None if dtype is None else build.cast(taken[0], dtype)
        return build.node(node.op_type, taken)

    def _differ_in_front(self, one: Dims, other: Dims) -> bool:
        """Whether two shapes are the same but for axes of length 1 in front."""
        least = min(len(one), len(other))
        rest = (*one[: len(one) - least], *other[: len(other) - least])
        same = map(self._builder.facts.same, one[len(one) - least :], other[len(other) - least :])
        return len(one) <= _RANK and all(dim == 1 for dim in rest) and all(same)

    def _spans(self, dims: Dims) -> tuple[bool, bool] | None:
        """Whether a shape has the axis of rows and that of keys; None if it broadcasts in another way."""
        if len(dims) > _RANK:
            return None
        rows, columns = (1, 1, *dims)[-2:]
        pairs = [(rows, self._lengths[0]), (columns, self._lengths[1])]
        if any(dim != 1 and not self._builder.facts.same(dim, length) for dim, length in pairs):
            return None
        return rows != 1, columns != 1

    def _picked(self, value: ir.Value) -> ir.Value:
        """The elements of a tensor at these rows and keys."""
        build, dims = self._builder, dims_of(self._builder, value)
        spans = self._spans(dims)
        assert spans is not None
        front = dims[:-2]
        if spans == (False, False):
            return value if len(dims) < 3 else build.reshape(value, [*front, 1, 1, 1])
        index, flat = self._rows, self._lengths[0]
        if spans[1]:
            index, flat = self._columns, self._lengths[1]
        if spans == (True, True):
            wide = self._integer("Mul", self._rows, build.shape([self._lengths[1]]))
            index, flat = self._integer("Add", wide, self._columns), self._lengths[0] * self._lengths[1]
        line = build.reshape(value, [*front, flat])
        return build.node("Gather", [line, index], {"axis": len(front)})

    def _grid(self, begin: ir.Value, length: Dim) -> ir.Value:
        """(blocks, 1, length): places from the beginning of each block on."""
        begin = self._builder.reshape(begin, [self.count, 1, 1])
        return self._integer("Add", begin, self._builder.reshape(self._builder.counting(length), [1, 1, length]))

    def _integer(self, op: str, left: ir.Value, right: ir.Value) -> ir.Value:
        return self._builder.elementwise(op, [left, right])
