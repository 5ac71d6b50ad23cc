"""Masks and biases in the spellings of exporters and of people."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tests.fuzz.frame import GROWING, Frame
from tests.fuzz.recipe import BIASES, Mask
from tests.fuzz.writer import Dims, Writer
from tests.support.bundled import Array

LONGEST = 80
"""Positions that constant tables have."""
_FILLS = {"lowest": None, "-inf": -np.inf, "nan": np.nan}
PREFIX, BLOCK = 2, 2
_IN_SCORES = frozenset(["where", "where_not", "mixed", "mul", "floor", "min", "branches", "mixed_branches"])
_JOINING = {"min": "Min", "max": "Max"}
_OTHERS = {"and": "And", "or": "Or", "xor": "Xor"}


class Masks:
    """The masks of one graph."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.g: Writer = frame.g
        self.recipe = frame.recipe

    @property
    def behind(self) -> int | None:
        """The number of the mask that stands behind the softmax and not in front of it; None where none does."""
        found = [number for number, mask in enumerate(self.recipe.masks) if mask.kind not in BIASES]
        return found[0] if found and self.recipe.guard.startswith("renormalized") else None

    def applied(self, scores: str, layer: int) -> str:
        """Scores with all masks applied."""
        masks = self.recipe.masks
        numbers = [number for number in range(len(masks)) if number != self.behind]
        if not self.recipe.chain.startswith("each"):
            return self.g.op("Add", scores, self.summed(numbers, layer)) if numbers else scores
        for number in numbers:
            scores = self._one(scores, masks[number], number, layer)
        return scores

    def summed(self, numbers: Sequence[int], layer: int) -> str:
        """Masks as one bias: their sum, or a minimum or a maximum of them."""
        added = [self._added(self.recipe.masks[number], number, layer) for number in numbers]
        total = functools.reduce(functools.partial(self.g.op, _JOINING.get(self.recipe.chain, "Add")), added)
        return self._cut_short(total) if self.recipe.chain.startswith("summed_") else total

    def _cut_short(self, bias: str) -> str:
        """A bias that is nowhere below a number."""
        floor = self.fill(self.recipe.floor)
        if self.recipe.chain.endswith("_floor"):
            return self.g.op("Max", bias, floor)
        return self.g.op("Clip", bias, floor, self.g.num(0))

    def fill(self, name: str) -> Array:
        """A fill as a constant of the graph's type."""
        number = _FILLS.get(name, 0.0)
        if number is None:
            return np.asarray(np.finfo(self.g.float).min)
        return self.g.num(number or float(name))

    def kept(self, mask: Mask, number: int, layer: int) -> str:
        """A mask as booleans, true where a row sees a key."""
        return self._cut_off(mask, self._once(("kept", number), layer, lambda: self._joined(mask, number)))

    def _cut_off(self, mask: Mask, value: str) -> str:
        """With as many columns as there are keys."""
        if mask.cut == "none":
            return value
        return self.g.op("Slice", value, [0], self.g.wide(self.g.length(self.frame.stored[mask.cut], 2)), [-1])

    def _once(self, key: tuple[object, ...], layer: int, made: Callable[[], str]) -> str:
        key = key if self.recipe.shared else (*key, layer)
        if key not in self.frame.shared:
            self.frame.shared[key] = made()
        return self.frame.shared[key]

    def _one(self, scores: str, mask: Mask, number: int, layer: int) -> str:
        g, how = self.g, mask.applied
        if how == "in_place":
            return self._in_place(scores, self._added(mask, number, layer))
        if mask.kind in BIASES or (how not in _IN_SCORES):
            return g.op("Add", scores, self._added(mask, number, layer))
        kept, fill = self.kept(mask, number, layer), self.fill(mask.fill)
        if how == "where":
            return g.op("Where", kept, scores, fill)
        if how == "where_not":
            return g.op("Where", self._once(("not", number), layer, lambda: g.op("Not", kept)), fill, scores)
        if how == "mul":
            return g.op("Mul", scores, g.cast_float(kept))
        if how == "mixed":
            as_float = g.cast_float(kept)
            lost = g.op("Mul", g.op("Sub", g.num(1), as_float), fill)
            return g.op("Add", g.op("Mul", scores, as_float), lost)
        if how == "branches":
            return g.op("Where", kept, scores, g.op("Add", scores, fill))
        if how == "mixed_branches":
            lost = g.cast_float(g.op("Not", kept))
            return g.op("Add", g.op("Mul", scores, g.cast_float(kept)), g.op("Mul", lost, g.op("Add", scores, fill)))
        if how == "floor":
            return g.op("Max", g.op("Add", scores, g.op("Where", kept, g.num(0), fill)), self.fill("-1e9"))
        return g.op("Min", scores, g.op("Where", kept, self.g.num(1e4), fill))

    def _in_place(self, scores: str, added: str) -> str:
        """Added to all columns but the first, which are written back."""
        g, behind = self.g, ([1], [1 << 40], [3])
        whole = g.op("Expand", added, g.op("Shape", scores))
        part = g.op("Add", g.op("Slice", scores, *behind), g.op("Slice", whole, *behind))
        places = g.unsqueeze(g.op("Range", 1, g.length(scores, 3), 1), 1)
        written = g.op("ScatterND", g.transpose(scores, 3, 1, 2, 0), places, g.transpose(part, 3, 1, 2, 0))
        return g.transpose(written, 3, 1, 2, 0)

    def _added(self, mask: Mask, number: int, layer: int) -> str:
        if mask.kind in BIASES:
            found = self._cut_off(mask, self._once(("bias", number), layer, lambda: self._bias(mask, number)))
        else:
            found = self._once(("added", number), layer, lambda: self._as_bias(mask, number, layer))
        return self._cut_short(found) if self.recipe.chain.startswith("each_") else found

    def _as_bias(self, mask: Mask, number: int, layer: int) -> str:
        """A mask as what is added to scores."""
        g, how, fill = self.g, mask.applied, self.fill(mask.fill)
        if mask.kind == "causal" and mask.spelled == "triu_fill" and mask.join == "none":
            return self._triangle_of_fill(fill)
        kept = self.kept(mask, number, layer)
        if how == "add_scaled":
            return g.op("Mul", g.op("Sub", g.num(1), g.cast_float(kept)), fill)
        if how == "sub_scaled":
            return g.op("Neg", g.op("Mul", g.cast_float(g.op("Not", kept)), -fill))
        if how == "inverted":
            inverted = g.op("Sub", g.num(1), g.cast_float(kept))
            return g.op("Where", g.cast(inverted, "bool"), fill, inverted)
        if how == "integers":
            number = int(max(float(fill), -1e9)) if np.isfinite(fill) else -(10**9)
            return g.cast_float(g.op("Mul", g.op("Sub", 1, g.cast(kept, "int64")), number))
        if how == "log":
            return g.op("Log", g.cast_float(kept))
        return g.op("Where", kept, g.num(0), fill)

    def _triangle_of_fill(self, fill: Array) -> str:
        g, s, t = self.g, self.frame.length("s"), self.frame.length(self.frame.long)
        full = g.op("Expand", fill, g.vector(s, t))
        return g.op("Trilu", full, g.op("Add", self.frame.first_row, 1), upper=1)

    def _joined(self, mask: Mask, number: int) -> str:
        g = self.g
        first = self._kind(mask, mask.kind, number)
        if mask.join == "none":
            return first
        second = self._kind(mask, mask.other, number + 10)
        if mask.join in _OTHERS:
            return g.op(_OTHERS[mask.join], first, second)
        if mask.join == "and_not":
            return g.op("And", first, g.op("Not", second))
        if mask.join == "mul":
            return g.op("Greater", g.op("Mul", g.cast_float(first), g.cast_float(second)), g.num(0))
        if mask.join == "bit_and":
            return g.cast(g.op("BitwiseAnd", g.cast(first, "int32"), g.cast(second, "int32")), "bool")
        return g.cast(g.op("Where", first, g.cast(second, "int32"), np.int32(0)), "bool")

    def _kind(self, mask: Mask, kind: str, number: int) -> str:
        if kind == "causal":
            return self._causal(mask)
        if kind in {"padding", "lengths", "given", "documents"}:
            return getattr(self, f"_{kind}")(mask, number)
        if kind == "table":
            return self._cut(self.g.rng.random((LONGEST, LONGEST)) < 0.7)
        i, j = self.places(mask)
        return getattr(self, f"_{kind}")(i, j)

    def places(self, mask: Mask) -> tuple[str, str]:
        """Positions of queries (s, 1) and of keys (1, t)."""
        g, frame = self.g, self.frame
        j = g.count(frame.length(frame.long))
        if mask.rows == "slice" and frame.recipe.cache in GROWING:
            i = g.op("Slice", j, g.wide(frame.first_row), g.wide(frame.length("t")), [0])
        elif mask.rows == "zero":
            i = g.count(frame.length("s"))
        else:
            first = frame.first_row
            i = g.count(frame.length("s"))
            i = i if isinstance(first, int) else g.op("Add", i, first)
        if mask.spelled == "cumsum":
            ones = g.op("Expand", 1, g.vector(frame.length(frame.long)))
            j = g.op("Sub", g.op("CumSum", ones, np.int32(0)), 1)
        return g.unsqueeze(i, 1), g.unsqueeze(j, 0)

    def _cut(self, table: Array) -> str:
        """The rows and columns of a constant table that there are."""
        g, frame = self.g, self.frame
        s, t, first = frame.length("s"), frame.length(frame.long), frame.first_row
        if isinstance(first, int):
            return g.op("Slice", g.op("Slice", table, [0], g.wide(s), [0]), [0], g.wide(t), [1])
        rows = g.op("Slice", table, g.wide(first), g.wide(g.op("Add", first, s)), [0])
        return g.op("Slice", rows, [0], g.wide(t), [1])

    def _causal(self, mask: Mask) -> str:
        g, frame = self.g, self.frame
        if mask.spelled == "table":
            table = np.tril(np.ones((1, 1, LONGEST, LONGEST), bool))
            return self._cut(table[0, 0])
        if mask.spelled in {"trilu", "trilu_runtime", "triu_fill"}:
            ones = g.op("Expand", 1, g.vector(frame.length("s"), frame.length(frame.long)))
            shift = frame.first_row if mask.spelled != "trilu_runtime" else g.feed("shift", (), "shift", "int64")
            return g.cast(g.op("Trilu", ones, shift, upper=0), "bool")
        i, j = self.places(mask)
        if mask.spelled == "strict":
            return g.op("Less", j, g.op("Add", i, 1))
        if mask.spelled == "sub":
            return g.compare("GreaterOrEqual", g.op("Sub", i, j), 0)
        if mask.spelled == "late":
            return g.op("Not", g.op("Greater", j, i))
        return g.compare("LessOrEqual", j, i)

    def _window(self, i: str, j: str) -> str:
        near = self.g.op("Less", self.g.op("Sub", i, j), self.recipe.window)
        return self.g.op("And", self.g.compare("LessOrEqual", j, i), near)

    def _band(self, i: str, j: str) -> str:
        return self.g.op("Less", self.g.op("Abs", self.g.op("Sub", i, j)), self.recipe.window)

    def _prefix(self, i: str, j: str) -> str:
        return self.g.op("Or", self.g.op("Less", j, PREFIX), self.g.compare("LessOrEqual", j, i))

    def _blocks(self, i: str, j: str) -> str:
        return self.g.equal(self.g.op("Div", i, BLOCK), self.g.op("Div", j, BLOCK))

    def _sinks_window(self, i: str, j: str) -> str:
        g = self.g
        near = g.op("Or", g.op("Less", g.op("Sub", i, j), self.recipe.window), g.op("Less", j, 1))
        return g.op("And", g.compare("LessOrEqual", j, i), near)

    def _parity(self, i: str, j: str) -> str:
        return self.g.equal(self.g.op("Mod", self.g.op("Sub", i, j), 2), 0)

    def _small_ints(self, i: str, j: str) -> str:
        g = self.g
        gap = g.op("Sub", g.cast(i, "int32"), g.cast(j, "int32"))
        return g.op("Less", g.cast(g.cast(gap, "uint8"), "int32"), np.int32(self.recipe.window))

    def _bits(self, i: str, j: str) -> str:
        return self.g.equal(self.g.op("BitwiseAnd", i, j), 0)

    def _self(self, i: str, j: str) -> str:
        return self.g.equal(i, j)

    def _first(self, i: str, j: str) -> str:
        del i
        return self.g.op("Less", j, 1)

    def _prefix_given(self, i: str, j: str) -> str:
        seen = self.g.op("Less", j, self.g.feed("prefix", (), "shift", "int64"))
        return self.g.op("Or", seen, self.g.compare("LessOrEqual", j, i))

    def _one_of(self, dim: str) -> str:
        return f"{dim}?" if dim in self.recipe.ones else dim

    def _padding(self, mask: Mask, number: int) -> str:
        """(b, 1, 1, t) of a mask that is given for each token."""
        g = self.g
        dims: Dims = (self._one_of("b"), self.frame.keys)
        raw = g.feed(f"mask{number}", dims, "mask", mask.dtype)
        if mask.spelled == "gather_nd" and g.opset >= 13:
            shape = g.vector(self.frame.length("b"), self.frame.length(self.frame.long), 1)
            columns = g.op("Expand", g.unsqueeze(g.count(self.frame.length(self.frame.long)), 1), shape)
            entries = g.op("Expand", g.unsqueeze(g.count(self.frame.length("b")), 1, 2), shape)
            if "b" not in self.recipe.ones:
                raw = g.op("GatherND", raw, g.op("Concat", entries, columns, axis=-1))
        if mask.spelled == "gather":
            t = self.frame.length(self.frame.long)
            flat = g.reshape(raw, -1)
            rows = g.op("Mul", g.count(g.length(raw, 0)), t)
            raw = g.op("Gather", flat, g.op("Add", g.unsqueeze(rows, 1), g.unsqueeze(g.count(t), 0)))
        seen = self._boolean(raw, mask)
        return g.unsqueeze(seen, 1, 2)

    def _boolean(self, raw: str, mask: Mask) -> str:
        g = self.g
        if mask.dtype == "bool":
            return raw
        kind = {"float": np.float32}.get(mask.dtype, getattr(np, mask.dtype, None))
        if mask.spelled in {"strict", "sub"} and mask.dtype != "uint8":
            return g.op("Greater", raw, np.asarray(0, kind))
        if mask.spelled in {"trilu", "late"} and mask.dtype in {"int64", "int32", "float"}:
            return g.equal(raw, np.asarray(1, kind))
        if mask.spelled == "cumsum" and mask.dtype in {"int64", "int32"}:
            return g.op("Not", g.equal(raw, np.asarray(0, kind)))
        return g.cast(raw, "bool")

    def _lengths(self, mask: Mask, number: int) -> str:
        g = self.g
        lengths = g.feed(f"lengths{number}", ("b",), "lengths", "int64")
        j = g.count(self.frame.length(self.frame.long))
        return g.unsqueeze(g.op("Less", g.unsqueeze(j, 0), g.unsqueeze(lengths, 1)), 1, 2)

    def _given(self, mask: Mask, number: int) -> str:
        dims: Dims = (self._one_of("b"), 1, self._one_of("s"), self.frame.keys)
        if mask.spelled in {"table", "trilu"}:
            dims = ("s", self.frame.keys)
        return self._boolean(self.g.feed(f"seen{number}", dims, "mask", mask.dtype), mask)

    def _documents(self, mask: Mask, number: int) -> str:
        g = self.g
        columns = g.feed(f"ids{number}", ("b", self.frame.keys), "ids", "int32" if mask.dtype == "int32" else "int64")
        if self.frame.keys == "s":
            rows = columns
        else:
            rows = g.feed(f"row_ids{number}", ("b", "s"), "ids", "int32" if mask.dtype == "int32" else "int64")
        return g.unsqueeze(g.equal(g.unsqueeze(rows, 2), g.unsqueeze(columns, 1)), 1)

    def _bias(self, mask: Mask, number: int) -> str:
        g, heads = self.g, self.recipe.heads
        if mask.kind == "given_bias":
            dims: Dims = (
                self._one_of("b"),
                self._one_of("h") if "h" in self.recipe.ones else heads,
                self._one_of("s"),
                self.frame.keys,
            )
            role = "bias_mask" if mask.dtype != "bool" else "normal"
            return g.feed(f"bias{number}", dims, role)
        if mask.kind == "bias_table":
            return g.unsqueeze(self._cut(g.weight(LONGEST, LONGEST)), 0)
        slopes = np.asarray(2.0 ** -np.arange(1, heads + 1), g.float).reshape(1, heads, 1, 1)
        i, j = self.places(mask)
        if mask.kind == "alibi_keys":
            return g.op("Mul", slopes, g.cast_float(j))
        gap = g.op("Sub", j, i)
        if mask.kind == "alibi":
            return g.op("Mul", slopes, g.cast_float(gap))
        if mask.kind == "distance":
            return g.op("Neg", g.op("Mul", g.cast_float(g.op("Abs", gap)), g.num(0.5)))
        table = g.weight(7, heads)
        bucket = g.op("Max", g.op("Min", gap, 3), -3) if g.opset >= 12 else g.op("Mod", gap, 4)
        found = g.op("Gather", table, g.op("Add", bucket, 3) if g.opset >= 12 else bucket)
        return g.unsqueeze(g.transpose(found, 2, 0, 1), 0)
