"""A cache that keeps no more than a window of keys and values: row 0 holds the first position that is left, the newest last."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.bodies.core import arithmetic, chosen, column, compared, integer, joined, length_of, places
from onnx_attnfuse.bodies.kv_append import Cache
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.graph.sizes import Dim


@dataclasses.dataclass(frozen=True)
class WindowCache:
    """Where the positions of each entry are; what is left of an entry follows from its number of tokens alone."""

    cache: Cache
    starts: ir.Value
    """(b), where the new positions of an entry start."""
    ends: ir.Value
    """(b), where they end."""
    window: int

    @property
    def _room(self) -> Dim:
        return self.cache.fused.dims(self.cache.past[0])[2]

    def _first(self, tokens: ir.Value) -> ir.Value:
        """(b), the position in row 0 after so many tokens; as many as a buffer is longer than the window, and one, go at once."""
        build, one = self.cache.fused.build, integer(self.cache.fused.build, 1)
        room = length_of(build, self._room)
        at_once = arithmetic(build, "Add", arithmetic(build, "Sub", room, integer(build, self.window)), one)
        over = arithmetic(build, "Max", arithmetic(build, "Sub", tokens, room), integer(build, 0))
        up = arithmetic(build, "Sub", arithmetic(build, "Add", over, at_once), one)
        return arithmetic(build, "Mul", arithmetic(build, "Div", up, at_once), at_once)

    def everything(self, values: list[ir.Value]) -> list[ir.Value]:
        """The past and the new keys, and values likewise, (b, m, c + s, h)."""
        return [joined(self.cache.fused.build, [old, new], 2) for old, new in zip(self.cache.past, values, strict=True)]

    def seen(self) -> ir.Value:
        """(b, 1, s, c + s): the keys that a row sees."""
        build, rows = self.cache.fused.build, self.cache.rows
        start = column(build, self.starts)
        old = arithmetic(build, "Add", column(build, self._first(self.starts)), places(build, self._room))
        after = arithmetic(build, "Add", start, length_of(build, rows))
        old = chosen(build, compared(build, "Less", old, start), old, after)  # the last rows hold nothing
        new = arithmetic(build, "Add", start, places(build, rows))
        keys = joined(build, [old, new], 1)
        batch, count = dims_of(build, keys)
        row, key = build.reshape(new, (batch, 1, rows, 1)), build.reshape(keys, (batch, 1, 1, count))
        since = arithmetic(build, "Sub", row, integer(build, self.window))
        return build.chained("And", [compared(build, "LessOrEqual", key, row), compared(build, "Greater", key, since)])

    def kept(self, everything: ir.Value) -> ir.Value:
        """Keys or values that are left, (b, m, c, h)."""
        build, (batch, heads, count, size) = self.cache.fused.build, dims_of(self.cache.fused.build, everything)
        room, start = length_of(build, self._room), column(build, self.starts)
        place = arithmetic(build, "Add", column(build, self._first(self.ends)), places(build, self._room))
        old = arithmetic(build, "Sub", place, column(build, self._first(self.starts)))
        new = arithmetic(build, "Add", arithmetic(build, "Sub", place, start), room)
        index = chosen(build, compared(build, "Less", place, start), old, new)
        index = arithmetic(build, "Min", index, arithmetic(build, "Sub", length_of(build, count), integer(build, 1)))
        dims = (batch, heads, self._room, size)
        index = build.expand(build.reshape(index, (batch, 1, self._room, 1)), dims, [False, True, False, True])
        return build.node("GatherElements", [everything, index], {"axis": 2}, dims=dims, dtype=build.facts.dtype(everything))

    def keys_defined(self) -> ir.Value:
        """(b, 1, c, 1): the rows of a present that hold a position."""
        build = self.cache.fused.build
        place = arithmetic(build, "Add", column(build, self._first(self.ends)), places(build, self._room))
        seen = compared(build, "Less", place, column(build, self.ends))
        return build.reshape(seen, (dims_of(build, self.ends)[0], 1, self._room, 1))
