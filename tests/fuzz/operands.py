"""Queries, keys and values: where they come from, their rotation, their cache and their repetition."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from tests.fuzz.frame import Frame, capacity
from tests.fuzz.masks import LONGEST
from tests.fuzz.writer import Operand, Writer
from tests.support.bundled import Array


@dataclasses.dataclass(frozen=True)
class Operands:
    """Three values (b, heads, length, size); keys as they are stored."""

    query: str
    key: str
    value: str


class Sources:
    """Makes the operands of each layer."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.g: Writer = frame.g
        self.recipe = frame.recipe
        self._rotated: tuple[str, str] | None = None

    @property
    def width(self) -> int:
        """Channels between layers."""
        return self.recipe.heads * self.recipe.v_size

    def operands(self, x: str | None, layer: int) -> Operands:
        """Those of a layer, whose input is `x`; of the first it is None."""
        source = self.recipe.source
        self.pasts(layer)
        if source.startswith("packed"):
            q, k, v = self._packed(x or self._states("x", "s"))
        elif source == "projected":
            states = x or self._states("x", "s")
            other = self._states("other", "t") if self.recipe.cross else states
            q, k, v = self._projected(states, other)
        else:
            q, k, v = self._separate(x)
        q, k = self._turned(self._normed(q)), self._turned(self._normed(k))
        return Operands(q, k, v)

    def _states(self, name: str, long: str) -> str:
        value = self.g.feed(name, ("b", long, self.width))
        for axis, dim in ((0, "b"), (1, long)):
            self.frame.spot(dim, value, axis)
        return value

    def _separate(self, x: str | None) -> tuple[str, str, str]:
        """Three inputs in one of four layouts."""
        recipe, long = self.recipe, self.frame.new
        shapes = (("q", recipe.heads, recipe.size, "s"), ("k", recipe.kv_heads, recipe.size, long))
        q, k, v = (self._input(*item) for item in (*shapes, ("v", recipe.kv_heads, recipe.v_size, long)))
        if x is None:
            return q, k, v
        mixed = self.g.op("MatMul", x, self.g.weight(self.width, recipe.heads * recipe.size, factor=1.5 * self.width**-0.5))
        return self._to_heads(mixed, recipe.heads, recipe.size, "s"), k, v

    def _input(self, name: str, heads: int, size: int, long: str) -> str:
        """(b, heads, length, size) of an input in the layout that is asked for."""
        g, frame, source = self.g, self.frame, self.recipe.source
        batch = self._batch(name)
        if source == "heads":
            value = g.feed(name, (batch, heads, long, size))
            self._spots(name, value, 0, 2, long)
            return value
        if source == "flat":
            value = g.feed(name, (batch, long, heads * size))
            self._spots(name, value, 0, 1, long)
            return self._to_heads(value, heads, size, long, name)
        if source == "flat_heads":
            value = g.feed(name, ("b", long, heads, size))
            self._spots(name, value, 0, 1, long)
            return g.transpose(value, 0, 2, 1, 3)
        value = g.feed(name, (long, "b", heads * size))
        self._spots(name, value, 1, 0, long)
        folded = g.reshape(value, frame.length(long), -1, size)
        turned = g.transpose(folded, 1, 0, 2)
        return g.reshape(turned, frame.length("b"), heads, frame.length(long), size)

    def _batch(self, name: str) -> str:
        how = self.recipe.batches
        alone = (how == "query_one" and name == "q") or (how == "keys_one" and name != "q")
        return "b?" if alone else "b"

    def _spots(self, name: str, value: str, batch: int, rows: int, long: str) -> None:
        if self._batch(name) == "b":
            self.frame.spot("b", value, batch)
        self.frame.spot(long, value, rows)

    def _to_heads(self, value: str, heads: int, size: int, long: str, name: str = "") -> str:
        """(b, s, heads * size) to (b, heads, s, size)."""
        return self.g.transpose(self.reshaped(value, long, heads, size, alone=self._batch(name) != "b"), 0, 2, 1, 3)

    def reshaped(self, value: str, long: str, *rest: int, alone: bool = False) -> str:
        """(b, s, rest...) as exporters write that shape."""
        how = self.recipe.reshapes
        if how == "minus" and not alone:
            return self.g.reshape(value, self.frame.length("b"), -1, *rest)
        if how in {"shapes", "literal"} and not alone:
            return self.g.reshape(value, self.frame.length("b"), self.frame.length(long), *rest)
        return self.g.reshape(value, 0, 0, *rest)

    def _linear(self, x: str, width: int) -> str:
        product = self.g.op("MatMul", x, self.g.weight(self.width, width, factor=1.5 * self.width**-0.5))
        bias = self.g.weight(width, factor=0.2)
        return self.g.op("Add", product, bias) if self.recipe.numbers % 3 else self.g.op("Add", bias, product)

    def _projected(self, x: str, other: str) -> tuple[str, str, str]:
        recipe = self.recipe
        q = self._linear(x, recipe.heads * recipe.size)
        k, v = (self._linear(other, recipe.kv_heads * size) for size in (recipe.size, recipe.v_size))
        long = self.frame.new
        return (
            self._to_heads(q, recipe.heads, recipe.size, "s"),
            self._to_heads(k, recipe.kv_heads, recipe.size, long),
            self._to_heads(v, recipe.kv_heads, recipe.v_size, long),
        )

    def _packed(self, x: str) -> tuple[str, str, str]:
        """One projection for all three."""
        g, recipe = self.g, self.recipe
        n, kv, d = recipe.heads, recipe.kv_heads, recipe.size
        widths = (n * d, kv * d, kv * recipe.v_size)
        both = self._linear(x, sum(widths))
        if recipe.source == "packed_five":
            five = g.transpose(self.reshaped(both, "s", 3, n, d), 2, 0, 3, 1, 4)
            q, k, v = (g.op("Gather", five, part, axis=0) for part in range(3))
            return q, k, v
        if recipe.source == "packed_heads":
            four = g.transpose(self.reshaped(both, "s", n, 3 * d), 0, 2, 1, 3)
            q, k, v = g.split(four, -1, d, d, d)
            return q, k, v
        if recipe.source == "packed_slice":
            edges = np.cumsum((0, *widths))
            parts = [g.slice(both, 2, int(start), int(end)) for start, end in itertools.pairwise(edges)]
        else:
            parts = g.split(both, -1, *widths)
        shapes = ((n, d), (kv, d), (kv, recipe.v_size))
        q, k, v = (self._to_heads(part, heads, size, "s") for part, (heads, size) in zip(parts, shapes, strict=True))
        return q, k, v

    # Normalization and rotation

    def _normed(self, value: str) -> str:
        """Heads whose squares have a mean of 1."""
        g, how = self.g, self.recipe.norm
        if how == "none":
            return value
        weight = np.abs(g.weight(self.recipe.size))
        if how == "operator":
            return g.op("RMSNormalization", value, weight, epsilon=1e-6)
        square = g.op("Mul", value, value)
        last = [-1]
        mean = g.op("ReduceMean", square, last) if g.opset >= 18 else g.op("ReduceMean", square, axes=last)
        root = g.op("Sqrt", g.op("Add", mean, g.num(1e-6)))
        return g.op("Mul", g.op("Div", value, root), weight)

    def _turned(self, value: str) -> str:
        """Rotary embeddings on (b, heads, s, size)."""
        g, how, size = self.g, self.recipe.rotary, self.recipe.size
        if how == "none":
            return value
        cos, sin = self._tables()
        if how == "operator":
            return g.op("RotaryEmbedding", value, cos, sin, interleaved=self.recipe.numbers % 2)
        if how == "partial":
            turned, rest = g.split(value, -1, size // 2, size - size // 2)
            return g.op("Concat", self._halves(turned, cos, sin, size // 2), rest, axis=-1)
        if how == "halves":
            return self._halves(value, cos, sin, size)
        if how == "strided":
            even, odd = (g.op("Slice", value, [start], [1 << 40], [3], [2]) for start in (0, 1))
        else:
            pairs = g.op("Reshape", value, [0, 0, 0, size // 2, 2]) if self.recipe.numbers % 2 else None
            if pairs is None:
                pairs = g.op("Reshape", value, [0, 0, 0, -1, 2])
            even, odd = (g.op("Gather", pairs, part, axis=4) for part in (0, 1))
        left = g.op("Sub", g.op("Mul", even, cos), g.op("Mul", odd, sin))
        right = g.op("Add", g.op("Mul", odd, cos), g.op("Mul", even, sin))
        both = g.op("Concat", g.unsqueeze(left, 4), g.unsqueeze(right, 4), axis=4)
        return g.op("Reshape", both, [0, 0, 0, size])

    def _halves(self, value: str, cos: str, sin: str, size: int) -> str:
        g, half = self.g, size // 2
        low, high = g.slice(value, 3, 0, half), g.op("Slice", value, [half], [1 << 62], [3])
        turned = g.op("Concat", g.op("Neg", high), low, axis=-1)
        return g.op("Add", g.op("Mul", value, cos), g.op("Mul", turned, sin))

    def _tables(self) -> tuple[str, str]:
        """Cosines and sines (b or 1, 1, s, channels)."""
        if self._rotated is None:
            self._rotated = self._made_tables()
        return self._rotated

    def _made_tables(self) -> tuple[str, str]:
        g, recipe = self.g, self.recipe
        turned = recipe.size // 2 if recipe.rotary == "partial" else recipe.size
        wide = recipe.rotary in {"partial", "halves"}
        frequencies = np.asarray(0.7 ** np.arange(turned // 2), np.float32)
        if recipe.tables == "range":
            rows = g.count(self.frame.length("s"), self.frame.first_row)
            at = g.unsqueeze(rows, 0)
        else:
            at = g.feed("positions", ("b", "s"), "positions", "int64")
        if recipe.tables == "gathered":
            angles: Array = np.arange(LONGEST)[:, None] * frequencies
            angles = np.concatenate([angles, angles], -1) if wide else angles
            found = [g.op("Gather", np.asarray(part(angles), g.float), at) for part in (np.cos, np.sin)]
        else:
            angle = g.op("Mul", g.unsqueeze(g.cast(at, "float32"), 2), frequencies)
            angle = g.op("Concat", angle, angle, axis=-1) if wide else angle
            found = [g.cast_float(g.op(kind, angle)) for kind in ("Cos", "Sin")]
        if recipe.rotary == "operator":
            shape = g.vector(self.frame.length("b"), self.frame.length("s"), turned // 2)
            cos, sin = (g.op("Expand", table, shape) for table in found)
            return cos, sin
        cos, sin = (g.unsqueeze(table, 1) for table in found)
        return cos, sin

    # Cache and groups

    def pasts(self, layer: int) -> list[str]:
        """Keys and values of the past as inputs, or both in one."""
        g, recipe, how = self.g, self.recipe, self.recipe.cache
        kv, d, e = recipe.kv_heads, recipe.size, recipe.v_size
        shapes = {
            "stacked": {"past": (2, "b", kv, "p", d)},
            "transposed": {"past_k": ("b", kv, d, "p"), "past_v": ("b", kv, "p", e)},
            "concat_flat": {"past_k": ("b", "p", kv, d), "past_v": ("b", "p", kv, e)},
            "concat": {"past_k": ("b", kv, "p", d), "past_v": ("b", kv, "p", e)},
        }.get(how, {})
        found = [g.feed(f"{name}{layer}", dims) for name, dims in shapes.items()]
        for name, dims in zip(found, shapes.values(), strict=True):
            self.frame.spot("p", name, dims.index("p"))
        return found

    def cached(self, key: str, value: str, layer: int) -> tuple[str, str]:
        """Keys and values with those of the past; both are outputs too."""
        g, recipe, how = self.g, self.recipe, self.recipe.cache
        if how == "none" or recipe.operator == "past":
            return key, value
        if how.startswith("static"):
            return self._in_place(key, value, layer)
        pasts, kv = self.pasts(layer), recipe.kv_heads
        if how == "stacked":
            old = [g.op("Gather", pasts[0], part, axis=0) for part in (0, 1)]
            key, value = (g.op("Concat", left, new, axis=2) for left, new in zip(old, (key, value), strict=True))
            both = g.op("Concat", g.unsqueeze(key, 0), g.unsqueeze(value, 0), axis=0)
            g.gives_as(both, f"present{layer}", 2, "b", kv, "t", recipe.size)
            return key, value
        return self._grown(pasts[0], key, "k", layer, recipe.size), self._grown(pasts[1], value, "v", layer, recipe.v_size)

    def _grown(self, past: str, new: str, name: str, layer: int, size: int) -> str:
        """New rows behind those of the past."""
        g, kv, how, present = self.g, self.recipe.kv_heads, self.recipe.cache, f"present_{name}{layer}"
        if how == "transposed" and name == "k":
            both = g.op("Concat", past, g.transpose(new, 0, 1, 3, 2), axis=-1)
            g.gives_as(both, present, "b", kv, size, "t")
            return g.transpose(both, 0, 1, 3, 2)
        if how == "concat_flat":
            both = g.op("Concat", past, g.transpose(new, 0, 2, 1, 3), axis=1)
            g.gives_as(both, present, "b", "t", kv, size)
            return g.transpose(both, 0, 2, 1, 3)
        both = g.op("Concat", past, new, axis=-2 if self.recipe.numbers % 2 else 2)
        g.gives_as(both, present, "b", kv, "t", size)
        return both

    def _in_place(self, key: str, value: str, layer: int) -> tuple[str, str]:
        """Caches of one length with new rows at their places."""
        g, recipe = self.g, self.recipe
        results: list[str] = []
        for name, new, size in (("k", key, recipe.size), ("v", value, recipe.v_size)):
            dims = ("b", recipe.kv_heads, capacity(recipe), size)
            results.append(self._written(g.feed(f"{name}_cache{layer}", dims), new))
            g.gives_as(results[-1], f"present_{name}{layer}", *dims)
        return results[0], results[1]

    def _written(self, cache: str, new: str) -> str:
        """A cache of one length with new rows at their places."""
        g, frame = self.g, self.frame
        if self.recipe.cache == "static_operator":
            start = g.op("Expand", g.wide(frame.first_row), g.vector(frame.length("b")))
            return g.op("TensorScatter", cache, new, start, axis=2)
        places: Operand = g.count(frame.length("s"), frame.first_row)
        if self.recipe.cache == "static_elements":
            wide = g.reshape(places, 1, 1, -1, 1)
            return g.op("ScatterElements", cache, g.op("Expand", wide, g.op("Shape", new)), new, axis=2)
        turned = g.transpose(cache, 2, 0, 1, 3)
        rows = g.op("ScatterND", turned, g.unsqueeze(places, 1), g.transpose(new, 2, 0, 1, 3))
        return g.transpose(rows, 1, 2, 0, 3)

    def repeated(self, value: str, size: int) -> str:
        """(b, kv_heads, t, size) to (b, heads, t, size)."""
        g, recipe = self.g, self.recipe
        kv, group, how = recipe.kv_heads, recipe.group, recipe.repeat
        if group == 1:
            return value
        if how == "gather":
            return g.op("Gather", value, np.repeat(np.arange(kv), group), axis=1)
        if how == "concat":
            heads = g.split(value, 1, *[1] * kv) if kv > 1 else [value]
            return g.op("Concat", *[head for head in heads for _ in range(group)], axis=1)
        if how in {"tile", "five"}:
            wide = g.op("Tile", g.unsqueeze(value, 2), [1, 1, group, 1, 1])
        elif how == "expand":
            wide = g.op("Expand", g.unsqueeze(value, 2), [1, 1, group, 1, 1])
        else:
            batch, long = g.length(value, 0), g.length(value, 2)
            wide = g.op("Expand", g.unsqueeze(value, 2), g.vector(batch, kv, group, long, size))
            return g.reshape(wide, batch, recipe.heads, long, size)
        if how == "five":
            return g.reshape(wide, g.length(value, 0), recipe.heads, -1, size)
        return g.reshape(wide, 0, recipe.heads, -1, size)
