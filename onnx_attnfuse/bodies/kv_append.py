"""New keys and values after those of earlier positions, each entry of a batch having a length of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import (
    INTEGER,
    arithmetic,
    by_entry,
    chosen,
    column,
    compared,
    integer,
    joined,
    length_of,
    places,
)
from onnx_attnfuse.bodies.fused_node import FusedNode
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Scalar
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS, is_standard
from onnx_attnfuse.graph.sizes import Dim

_FILLING = REARRANGES | REPEATS | CASTS


@dataclasses.dataclass(frozen=True)
class Cache:
    """Where the new positions of each entry go."""

    fused: FusedNode
    past: tuple[ir.Value, ...]
    """Keys and values of earlier positions, (b, m, p, h) each; none in a prompt."""
    rows: Dim
    """How many positions are new."""
    total: ir.Value
    """The length of the longest entry, an integer of no axes."""
    starts: ir.Value | None = None
    """(b), where the new ones start; None: where the past ends."""
    ends: ir.Value | None = None
    """(b), where an entry ends; None: where the new ones do."""

    def offset(self) -> ir.Value | Dim:
        """The position of the first row: a size, or (b, 1, 1, 1)."""
        if self.starts is not None:
            return by_entry(self.fused.build, self.starts)
        return self.fused.dims(self.past[0])[2] if self.past else 0

    def positions(self) -> ir.Value:
        """Positions of the rows, (s) or (b, s)."""
        build, rows = self.fused.build, places(self.fused.build, self.rows)
        if self.starts is not None:
            return arithmetic(build, "Add", column(build, self.starts), rows)
        return arithmetic(build, "Add", rows, length_of(build, self.fused.dims(self.past[0])[2])) if self.past else rows

    def appended(self, values: list[ir.Value]) -> list[ir.Value]:
        """Keys and values (b, m, s, h) after earlier ones."""
        if not self.past:
            return values
        pairs = zip(self.past, values, strict=True)
        if self.starts is None:
            return [joined(self.fused.build, [old, new], 2) for old, new in pairs]
        return [self._looked_up(old, new, self.starts) for old, new in pairs]

    def _looked_up(self, old: ir.Value, new: ir.Value, starts: ir.Value) -> ir.Value:
        """Every place of the present from the past, from the new ones, or from the zero after both."""
        build, (batch, heads, earlier, size) = self.fused.build, dims_of(self.fused.build, old)
        dtype = build.facts.dtype(new) or ir.DataType.FLOAT
        zero = build.expand(build.constant(np.zeros((), dtype.numpy())), (batch, heads, 1, size), [True] * 4)
        everything = joined(build, [old, new, zero], 2)
        place, start, past = self._places(earlier), column(build, starts), length_of(build, earlier)
        rows = length_of(build, self.rows)
        end = arithmetic(build, "Add", start, rows)
        moved = arithmetic(build, "Add", place, arithmetic(build, "Sub", past, start))
        end_or_later = chosen(build, compared(build, "Less", place, end), moved, arithmetic(build, "Add", past, rows))
        index = chosen(build, compared(build, "Less", place, start), place, end_or_later)
        length = dims_of(build, place)[0]
        dims = (batch, heads, length, size)
        index = build.expand(build.reshape(index, (batch, 1, length, 1)), dims, [False, True, False, True])
        return build.node("GatherElements", [everything, index], {"axis": 2}, dims=dims, dtype=build.facts.dtype(new))

    def _places(self, earlier: Dim) -> ir.Value:
        """0, 1, ... up to the length of the present: that of the longest entry, or of the past if that is longer."""
        build = self.fused.build
        length = arithmetic(build, "Max", self.total, length_of(build, earlier))
        found = build.node("Range", [integer(build, 0), length, integer(build, 1)], dtype=INTEGER)
        build.facts.record(found, [build.facts.fresh(found, 0)], INTEGER)
        return found

    def cut(self, present: ir.Value) -> ir.Value:
        """Keys or values up to the length of the longest entry only."""
        if self.starts is None:
            return present
        build, (batch, heads, _, size) = self.fused.build, dims_of(self.fused.build, present)
        end = build.reshape(self.total, (1,))
        found = build.node("Slice", [present, build.constant([0]), end, build.constant([2])], dtype=build.facts.dtype(present))
        build.facts.record(found, [batch, heads, build.facts.fresh(found, 2), size], None)
        return found

    def rows_defined(self) -> ir.Value | None:
        """(b, s, 1): the rows that belong to their entry; None: all do."""
        if self.ends is None:
            return None
        build = self.fused.build
        batch = dims_of(build, self.ends)[0]
        seen = compared(build, "Less", self.positions(), column(build, self.ends))
        return build.reshape(seen, (batch, self.rows, 1))

    def keys_defined(self, present: ir.Value) -> ir.Value | None:
        """(b, 1, t, 1): the positions of a present that belong to their entry; None: all do."""
        if self.ends is None:
            return None
        build, length = self.fused.build, dims_of(self.fused.build, present)[2]
        seen = compared(build, "Less", places(build, length), column(build, self.ends))
        return build.reshape(seen, (dims_of(build, self.ends)[0], 1, length, 1))


def cache_of(
    fused: FusedNode, past: tuple[ir.Value, ...], rows: Dim, last: ir.Value, total: ir.Value, counts: ir.Value | None = None
) -> Cache:
    """The cache of an operator that is given the place of the last key of every entry, and how many keys the longest has.

    Args:
        fused: The operator.
        past: Keys and values of earlier positions.
        rows: How many positions are new.
        last: The place of the last key of every entry.
        total: How many keys the longest entry has; where rows are counted, no fewer than that.
        counts: How many of its new positions each entry keeps; None: all, in a prompt as many as it has keys.
    """
    build = fused.build
    everything = rows + (fused.dims(past[0])[2] if past else 0)
    longest = build.reshape(build.cast(total, INTEGER), ())
    cache = Cache(fused, past, rows, longest)
    whole = counts is None or _number(counts, build.facts) == rows
    if whole and _number(total, build.facts) == everything and _number(last, build.facts) == everything - 1:
        return cache
    ends = arithmetic(build, "Add", build.cast(last, INTEGER), build.constant([1]))
    ends = build.reshape(ends, (fused.dims(fused.operand("query"))[0],))
    if not past:
        return dataclasses.replace(cache, ends=ends)
    if counts is not None:
        kept = build.reshape(build.cast(counts, INTEGER), dims_of(build, ends))
        return dataclasses.replace(cache, starts=arithmetic(build, "Sub", ends, kept), ends=ends)
    count = length_of(build, rows)
    is_prompt = compared(build, "Equal", longest, count)
    starts = chosen(build, is_prompt, integer(build, 0), arithmetic(build, "Sub", ends, count))
    return dataclasses.replace(cache, starts=starts, ends=ends)


def _number(value: ir.Value | None, facts: Facts) -> Scalar:
    """The one number that every element of a value is, read through views and repetitions; None if that is unknown."""
    while value is not None:
        content = facts.content(value)
        if isinstance(content, tuple):
            return content[0] if len(set(content)) == 1 else None
        if content is not None:
            return content
        node = value.producer()
        if not is_standard(node, *_FILLING):
            return None
        value = node.inputs[0]
    return None
