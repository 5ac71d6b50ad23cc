"""MultiHeadAttention over blocks of rows, each with the strip of keys that its window reaches, where a mask has a window.

    query  (b, s, n·h)     → (b·blocks, w, n·h)      rows, the last block filled up
    key    (b, t, n·h)     → (b·blocks, n, k, h)     the k keys that w rows may see, moved to lie inside the sequence
    bias   (b, n, s, t)    → (b·blocks, n, w, k)     the mask at these rows and keys
    result (b·blocks, w, …) → (b, s, n·v)

Keys outside a strip are masked in all rows of its block, so they have no weight, unless a row has no key at all. Neither block
nor strip is longer than the sequence: sizes are computed at run time, and a sequence that gains nothing by blocks is one. Block
`i` has rows `i·w` to `i·w + w - 1`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.predicates import Causal, Window
from onnx_attnfuse.attention.masks.seen_keys import sees_a_key
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, RESHAPES, is_standard
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.thresholds import ABSORBS
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.kernels.operators.multi_head_attention import INFO
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding
from onnx_attnfuse.targets.bias import letters_of
from onnx_attnfuse.targets.fully_masked_rows import Rows, read_rows
from onnx_attnfuse.targets.layout import grouped, replacing
from onnx_attnfuse.targets.masked_rows import chosen_above

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


_LEAST_BLOCK = 64
"""Rows of a block at least: the products of smaller ones take as long."""
_WIDEST = 512
"""The widest band that is computed in blocks: verification still runs sequences that are long enough for several."""
_SINCE = 12
"""The opset from which on Min and Max take integers."""


@dataclasses.dataclass(frozen=True)
class Band:
    """`i - back <= j <= i + ahead`, whatever else a mask forbids."""

    back: Dim
    width: int
    """`back + ahead`."""


def band_of(spec: AttentionSpec, meaning: Meaning) -> Band | None:
    """The narrowest band that all keys of a row lie in, of a width that is known; None if there is none."""
    if spec.causal or spec.cache is not None or spec.sink is not None or spec.unshifted or spec.renormalized is not None:
        return None
    triangles = [item.offset for item in meaning.predicates if isinstance(item, Causal)]
    windows = [item.reach for item in meaning.predicates if isinstance(item, Window)]
    bands = [(back, back + ahead) for back, ahead in itertools.product(windows, triangles)]
    known = [Band(back, width) for back, width in bands if isinstance(width, int) and 0 <= width <= _WIDEST]
    return min(known, key=lambda band: band.width, default=None)


def block_encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """A bias in blocks, where the mask has a window; keys and values are of one head size."""
    band, axes = band_of(spec, meaning), spec.axes
    same = length(axes.h) == length(axes.v) and isinstance(length(axes.h), int)
    return () if band is None or not same else (MaskEncoding("bias", band=band.width),)


def emit_blocks(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
    """Builds the operator over blocks for `spec`, beside its nodes.

    Raises:
        Refused: Rows without a key would be others, or an operand cannot be brought into the layout.
    """
    builder, axes, band = context.builder, spec.axes, band_of(spec, meaning)
    assert band is not None
    assert spec.dtype is not None
    if builder.opset < _SINCE:
        raise Refused("old-opset", f"blocks need opset {_SINCE}, and the model has {builder.opset}")
    rows = read_rows(spec, meaning, encoding, context)
    assert rows.bias is not None
    strips = Strips(builder, length(axes.b), (length(axes.i), length(axes.j)), _rows(band), (band.back, band.width))
    seen = None if sees_a_key(meaning, context.bounds) else _seeing(strips, rows, context)
    operands = grouped(builder, spec, rows)
    (query, key, value), shared = operands.values, length(operands.kv_heads)
    assert isinstance(shared, int)
    heads = axes.num_heads, axes.num_heads // shared
    inputs = {
        "query": strips.blocks(query),
        "key": strips.by_head(key, *heads, _channels(axes.h)),
        "value": strips.by_head(value, *heads, _channels(axes.v)),
        "attention_bias": strips.bias(rows.bias.value),
    }
    fused = builder.node(
        INFO.name,
        INFO.arranged(inputs),
        {"num_heads": axes.num_heads, "scale": abs(operands.scale) or 1.0},
        domain=INFO.domain,
        dims=[length(axes.b) * strips.count, strips.rows, length((*axes.n, *axes.v))],
        dtype=spec.dtype,
        hint=f"{spec.name}/{INFO.name}",
    )
    result = strips.whole(fused)
    if seen is not None:
        result = _levelled(builder, result, value, seen, spec, heads)
    form = f"attention_bias {letters_of(rows.bias)}, {_rows(band)} rows and {_rows(band) + band.width} keys at a time"
    emitted = replacing(builder, result, spec, rows, operands.chosen, operands.targets, form)
    return dataclasses.replace(emitted, node=producer_of(fused))


def _rows(band: Band) -> int:
    """How many rows a block of a long sequence has at most."""
    return max(_LEAST_BLOCK, (band.width + 1) // 2)


def _channels(axis: Axis) -> int:
    size = length(axis)
    assert isinstance(size, int)
    return size


def _seeing(strips: Strips, rows: Rows, context: BuildContext) -> ir.Value | None:
    """(b or 1, s, 1): rows that see a key; the others have the plain mean of all values. None where those are NaN.

    Raises:
        Refused: It is unknown which rows these are, or they have another result.
    """
    builder, bias = context.builder, rows.bias
    assert bias is not None
    seen, node = chosen_above(bias, context.bounds.masked_from, context), bias.value.producer()
    if rows.zero_query is not None or seen is None or node is None or seen.axes[1]:
        raise Refused("whole-window", "rows may see no key, and their result in blocks is unknown")
    numbers = [builder.facts.number(value) for value in node.inputs[1:] if value is not None]
    fill = min((number for number in numbers if number is not None), default=0.0)
    if fill == -math.inf:
        return None
    if fill > ABSORBS:
        raise Refused("whole-window", f"rows may see no key, and {fill:g} leaves something of their scores")
    some = builder.holds_along(strips.mask(seen.value), [1, 4], keep=False, by=context.device.provider.any_by)
    return strips.line(some)


def _levelled(
    builder: Builder, result: ir.Value, value: ir.Value, seen: ir.Value, spec: AttentionSpec, heads: tuple[int, int]
) -> ir.Value:
    """The result (b, s, n·v), in rows that see no key the mean of the values (b, t, n/group·v)."""
    (batch, keys, width), group = dims_of(builder, value), heads[1]
    count = builder.cast(builder.reshape(builder.shape([keys]), [1, 1, 1]), ir.DataType.FLOAT)
    share = builder.elementwise("Div", [builder.scalar(1.0, ir.DataType.FLOAT), count], ir.DataType.FLOAT)
    share = builder.expand(share, [1, 1, keys], [True, True, True])
    mean = builder.node("MatMul", [share, value], dims=[batch, 1, width], dtype=spec.dtype)  # a third of ReduceMean's time
    if group > 1:
        size = _channels(spec.axes.v)
        each = [batch, heads[0] // group, group, size]
        mean = builder.expand(builder.reshape(mean, [*each[:2], 1, size]), each, [False, False, True, False])
        mean = builder.reshape(mean, [batch, 1, width * group])
    return builder.elementwise("Where", [seen, result, mean], spec.dtype)
