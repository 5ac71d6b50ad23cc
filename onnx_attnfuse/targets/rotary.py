"""com.microsoft.RotaryEmbedding in front of an operator: queries and keys as they are before they are rotated.

Nothing needs to be known of positions: the cosines and sines that the source computes at run time are the operator's caches, with
a row for each position, or for each position of each entry of the batch. Equal layers share them.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import Rotary, Table
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.operators.rotary_embedding import INFO
from onnx_attnfuse.reasons import Refused

_MAX_ROTATED_CHANNELS = 1024
"""Channels of a head that a block of a GPU's threads can rotate."""


def takes(rotary: Rotary, target: Axes) -> bool:
    """Whether the operator can rotate a value laid out as `target`, (b, s, n·h) or (b, n, s, h).

    Not if heads differ, nor if the number of heads or of channels is known at run time only: both are attributes.
    """
    channels = leaves(rotary.channels)
    size = length(channels)
    if leaves(target[-1])[-len(channels) :] != channels or not isinstance(length(_heads(rotary, target)), int):
        return False
    if not isinstance(size, int) or size > _MAX_ROTATED_CHANNELS:
        return False
    return factors_of(rotary) <= {*leaves(target[0]), *leaves(target[-2])}


def _heads(rotary: Rotary, layout: Axes) -> Axis:
    """The heads of a value laid out as (b, s, n·h) or (b, n, s, h)."""
    return layout[1] if len(layout) == 4 else leaves(layout[2])[: -len(leaves(rotary.channels))]


def factors_of(rotary: Rotary) -> set[Factor]:
    """The factors of batch and rows that the rotation differs along."""
    if rotary.positions is not None:
        return {leaf for axis in refined(rotary.positions.axes) for leaf in axis}
    return {
        leaf
        for table in (rotary.cos, rotary.sin)
        for index, axis in enumerate(refined(table.indexed.axes))
        for leaf in axis
        if index != table.axis
    }


def can_empty(rotary: Rotary, rows: IndexedValue, batch: Axis, positions: Axis) -> bool:
    """Whether tables that are 0 in some rows make a rotation 0 there: all channels are rotated, and heads are alike.

        where(test, 0, rotate(q, cos, sin))  =  rotate(q, where(test, 0, cos), where(test, 0, sin))

    Tables are as long as a head, which all heads share, and one pair of them serves all layers.
    """
    whole, given = rotary.width == length(leaves(rotary.channels)), rotary.positions
    by_row = {leaf for axis in refined(rows.axes) for leaf in axis} <= {*leaves(batch), *leaves(positions)}
    return whole and by_row and (given is None or len(given.axes) > 1)


def rotated(builder: Builder, value: ir.Value, rotary: Rotary, layout: Axes, empty: IndexedValue | None = None) -> ir.Value:
    """`value`, laid out as (b, s, n·h) or (b, n, s, h), rotated; 0 in the rows where `empty` holds.

    Raises:
        Refused: The number of heads is known at run time only.
    """
    dtype = builder.facts.dtype(value)
    heads = length(_heads(rotary, layout))
    if not isinstance(heads, int):
        raise Refused(
            "rotated-otherwise",
            f"the number of heads, {heads}, is known at run time only; RotaryEmbedding has it as an attribute",
        )
    cos, sin, positions = tables(builder, rotary, layout[0], layout[-2], dtype)
    if empty is not None:
        cos, sin, positions = _emptied(builder, (cos, sin), positions, empty, layout)
    attributes: dict[str, int] = {"num_heads": heads, "interleaved": int(rotary.interleaved)}
    if rotary.width != length(leaves(rotary.channels)):
        attributes["rotary_embedding_dim"] = rotary.width
    inputs = INFO.arranged({"input": value, "position_ids": positions, "cos_cache": cos, "sin_cache": sin})
    return builder.node(INFO.name, inputs, attributes, domain=INFO.domain)


def tables(
    builder: Builder, rotary: Rotary, batch: Axis, rows: Axis, dtype: ir.DataType | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Cosines and sines as caches (position, pair), and the positions of the rows in them: (b, s), or (1), that of the first."""
    if rotary.positions is not None:
        given = rotary.positions
        positions = given.value if len(given.axes) == 1 else arrange(builder, given, (batch, rows))
        return _typed(builder, rotary.cos.indexed.value, dtype), _typed(builder, rotary.sin.indexed.value, dtype), positions
    batched = not factors_of(rotary).isdisjoint(leaves(batch))
    turn: Axis = (*batch, *rows) if batched else rows
    cos, sin = (_cache(builder, table, turn, rotary.width // 2, dtype) for table in (rotary.cos, rotary.sin))
    if not batched:
        return cos, sin, builder.constant([0])
    return cos, sin, counted_rows(builder, length(batch), length(rows))


def _emptied(
    builder: Builder, caches: tuple[ir.Value, ir.Value], positions: ir.Value, empty: IndexedValue, layout: Axes
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Caches with zeros in some rows: one for each position of each entry where the test, or the rotation, differs by entry."""
    batch, rows = layout[0], layout[-2]
    present = {leaf for axis in refined(empty.axes) for leaf in axis}
    test = arrange(builder, empty, (*(axis if present & set(axis) else () for axis in (batch, rows)), ()))
    counted, width = counted_rows(builder, length(batch), length(rows)), dims_of(builder, caches[0])[1]
    if builder.facts.rank(positions) == 1:
        by_row = [builder.reshape(cache, [1, length(rows), width]) for cache in caches]
    elif positions is counted:
        by_row = [builder.reshape(cache, [length(batch), length(rows), width]) for cache in caches]
    else:
        by_row = [builder.node("Gather", [cache, positions], {"axis": 0}) for cache in caches]
    zero = builder.scalar(0.0, builder.facts.dtype(caches[0]))
    chosen = [builder.elementwise("Where", [test, zero, cache]) for cache in by_row]
    alike = dims_of(builder, chosen[0])[0] == 1
    cos, sin = (builder.reshape(cache, [length(rows) if alike else length(batch) * length(rows), width]) for cache in chosen)
    return cos, sin, builder.constant([0]) if alike else counted


def counted_rows(builder: Builder, batch: Dim, rows: Dim) -> ir.Value:
    """An index for each row of each entry, (b, s) int64, in order: of tables with a row for each of them."""
    return builder.reshape(builder.counting(batch * rows), [batch, rows])


def is_same(one: Rotary, other: Rotary) -> bool:
    """Whether two values are rotated alike, row by row."""
    return key_of(one) == key_of(other)


def key_of(rotary: Rotary) -> tuple[object, ...]:
    """A key of a rotation: equal for two exactly if they are the same rotation."""
    tables = ((table.indexed.value, table.axis, table.start, table.step, table.negative) for table in (rotary.cos, rotary.sin))
    places = None if rotary.positions is None else rotary.positions.value
    return (*tables, rotary.width, rotary.interleaved, places)


def long_tables(
    builder: Builder, rotary: Rotary, batch: Axis, rows: Axis, least: Dim, dtype: ir.DataType | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Tables for an operator that wants caches of `least` positions or more, (position, pair), and an index per row, (b, s)."""
    cos, sin, positions = tables(builder, rotary, batch, rows, dtype)
    wanted = length(batch), length(rows)
    if builder.facts.rank(positions) == 1:
        counted = builder.elementwise("Add", [builder.counting(wanted[1]), positions])
        positions = builder.expand(builder.reshape(counted, [1, wanted[1]]), [*wanted], [True, False])
    nothing = builder.expand(builder.scalar(0.0, dtype), [least, rotary.width // 2], [True, True])
    cos, sin = (builder.node("Concat", [table, nothing], {"axis": 0}) for table in (cos, sin))
    return cos, sin, positions


def _cache(builder: Builder, table: Table, turn: Axis, pairs: int, dtype: ir.DataType | None) -> ir.Value:
    """The columns of a table in the order of pairs, a row for each element of `turn`."""
    value, axes = table.indexed.value, refined(table.indexed.axes)
    columns = (Factor(pairs),)
    if table.start or table.step != 1 or length(axes[table.axis]) != pairs:
        part = _part(builder, table, pairs)
        end = table.start + table.step * (pairs - 1) + 1
        value = part or builder.slice(_shared(builder, value), table.axis, table.start, end, table.step)
    else:
        value = _shared(builder, value)
    axes = (*axes[: table.axis], columns, *axes[table.axis + 1 :])
    dims = dims_of(builder, value)
    lengths = [length(axis) for axis in axes]
    unproven = [dim != wanted for dim, wanted in zip(dims, lengths, strict=True)]
    if any(unproven):
        value = builder.expand(value, lengths, unproven)
    value = _typed(builder, arrange(builder, IndexedValue(value, axes), (turn, columns)), dtype)
    return builder.elementwise("Neg", [value]) if table.negative else value


def _part(builder: Builder, table: Table, pairs: int) -> ir.Value | None:
    """The columns of a cosine or sine of angles side by side, computed of those angles alone; None where they are no such."""
    node, rank = table.indexed.value.producer(), len(table.indexed.axes)
    if not is_standard(node, "Cos", "Sin") or node.inputs[0] is None or table.step != 1:
        return None
    above, first = node.inputs[0].producer(), 0
    if not is_standard(above, "Concat") or attribute(above, "axis", 0) % rank != table.axis:
        return None
    for part in above.inputs:
        dims = builder.facts.dims(part)
        width = None if dims is None else dims[table.axis]
        if part is None or dims is None or not isinstance(width, int):
            return None
        if first == table.start and width == pairs:
            return builder.node(node.op_type, [part])
        first += width
    return None


def _shared(builder: Builder, value: ir.Value) -> ir.Value:
    """A cosine or sine that is computed for one use, computed once for all that ask for the same."""
    node = value.producer()
    if not is_standard(node, "Cos", "Sin") or len(value.uses()) > 1:
        return value
    return builder.node(node.op_type, node.inputs)


def _typed(builder: Builder, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    return value if dtype is None else builder.cast(value, dtype)
