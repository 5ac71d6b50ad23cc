"""Pieces that bodies share: heads, positions, masks as truth values and as a bias, root mean squares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.facts_view import broadcast
from onnx_attnfuse.graph.sizes import Dim, Size

INTEGER, TRUTH = ir.DataType.INT64, ir.DataType.BOOL
BY_HEAD = (0, 2, 1, 3)


def split_heads(build: Builder, value: ir.Value, heads: int, size: int) -> ir.Value:
    """(b, s, n·h) as (b, n, s, h)."""
    batch, length, _ = dims_of(build, value)
    return build.transpose(build.reshape(value, (batch, length, heads, size)), BY_HEAD)


def merge_heads(build: Builder, value: ir.Value) -> ir.Value:
    """(b, n, s, h) as (b, s, n·h)."""
    batch, heads, length, size = dims_of(build, value)
    return build.reshape(build.transpose(value, BY_HEAD), (batch, length, heads * size))


def repeat_heads(build: Builder, value: ir.Value, heads: int) -> ir.Value:
    """(b, m, t, h) with each head as often as it serves a head of the queries, which are consecutive."""
    batch, own, length, size = dims_of(build, value)
    assert isinstance(own, int)
    if own == heads:
        return value
    single = build.reshape(value, (batch, own, 1, length, size))
    wide = build.expand(single, (batch, own, heads // own, length, size), [False, False, True, False, False])
    return build.reshape(wide, (batch, heads, length, size))


def joined(build: Builder, values: list[ir.Value], axis: int) -> ir.Value:
    """Values concatenated."""
    shapes = [dims_of(build, value) for value in values]
    length: Dim = shapes[0][axis]
    for dims in shapes[1:]:
        length = length + dims[axis]
    dims = [length if place == axis else dim for place, dim in enumerate(shapes[0])]
    return build.node("Concat", values, {"axis": axis}, dims=dims, dtype=build.facts.dtype(values[0]))


def integer(build: Builder, number: int) -> ir.Value:
    """A constant of no axes."""
    return build.constant(np.asarray(number, np.int64))


def length_of(build: Builder, dim: Dim) -> ir.Value:
    """A size as an integer of no axes."""
    return integer(build, dim) if isinstance(dim, int) else build.reshape(build.shape([dim]), ())


def places(build: Builder, dim: Dim) -> ir.Value:
    """0, 1, ... up to a size."""
    return build.constant(np.arange(dim)) if isinstance(dim, int) else build.counting(dim)


def column(build: Builder, value: ir.Value) -> ir.Value:
    """(s) as (s, 1)."""
    return build.reshape(value, (*dims_of(build, value), 1))


def by_entry(build: Builder, value: ir.Value) -> ir.Value:
    """(b) as (b, 1, 1, 1)."""
    return build.reshape(value, (*dims_of(build, value), 1, 1, 1))


def arithmetic(build: Builder, op: str, left: ir.Value, right: ir.Value) -> ir.Value:
    """An integer from two."""
    return build.elementwise(op, [left, right], INTEGER)


def compared(build: Builder, op: str, left: ir.Value, right: ir.Value) -> ir.Value:
    """A truth value from two numbers."""
    return build.elementwise(op, [left, right], TRUTH)


def moved(build: Builder, offset: ir.Value | Dim, by: int) -> ir.Value | Dim:
    """A distance plus a number."""
    if not isinstance(offset, ir.Value):
        return offset + by
    return arithmetic(build, "Add", offset, integer(build, by)) if by else offset


def before(build: Builder, rows: Dim, columns: Dim, offset: ir.Value | Dim, *, opposite: bool = False) -> ir.Value:
    """True up to the key `offset` after the row: (s, t), or (b, 1, s, t) where it differs by entry."""
    row = column(build, places(build, rows))
    if isinstance(offset, Size):
        offset = length_of(build, offset)
    elif isinstance(offset, int):
        offset = integer(build, offset)
    last = row if build.facts.content(offset) == 0 else arithmetic(build, "Add", row, offset)
    return compared(build, "Greater" if opposite else "LessOrEqual", places(build, columns), last)


def chosen(build: Builder, where: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    """`yes` where a truth value holds, else `no`."""
    dims = broadcast([build.facts.dims(value) for value in (where, yes, no)])
    return build.node("Where", [where, yes, no], dims=dims, dtype=build.facts.dtype(yes))


def over_root(build: Builder, value: ir.Value, dtype: ir.DataType, axes: Sequence[int], epsilon: float) -> ir.Value:
    """A value divided by the root of the mean of its squares, computed in float32."""
    wide = build.cast(value, ir.DataType.FLOAT)
    squares = build.elementwise("Mul", [wide, wide], ir.DataType.FLOAT)
    mean = build.reduce("ReduceMean", squares, list(axes))
    shifted = build.elementwise("Add", [mean, build.scalar(epsilon, ir.DataType.FLOAT)], ir.DataType.FLOAT)
    root = build.node("Sqrt", [shifted], dims=build.facts.dims(shifted), dtype=ir.DataType.FLOAT)
    return build.cast(build.elementwise("Div", [wide, root], ir.DataType.FLOAT), dtype)
