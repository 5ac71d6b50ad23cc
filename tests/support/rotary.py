"""Spellings of rotary embeddings, and of what is none: tables of cosines and sines, and how queries and keys turn by them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from tests.support.graph_builder import GraphBuilder

HEADS, GROUPS, SIZE = 4, 2, 8
"""Heads of queries, of keys, and channels of each."""
FREQUENCIES = np.asarray([1.0, 0.3, 0.1, 0.03], np.float32)
LARGE = np.random.default_rng(7).standard_normal((2, 16, SIZE // 2)).astype(np.float32)
"""Cosines and sines of 16 positions, for all that is known of them."""
Tables = Callable[[GraphBuilder], tuple[str, str]]
Turn = Callable[[GraphBuilder, str, str, str], str]


def angles(g: GraphBuilder) -> str:
    """(p, s, 4), of positions that are given."""
    return g.op("Mul", g.op("Unsqueeze", g.op("Cast", "positions", to=1), [2]), FREQUENCIES)


def cosines(g: GraphBuilder, angle: str) -> tuple[str, str]:
    return g.op("Unsqueeze", g.op("Cos", angle), [1]), g.op("Unsqueeze", g.op("Sin", angle), [1])


def wide(g: GraphBuilder) -> tuple[str, str]:
    return cosines(g, g.op("Concat", *[angles(g)] * 2, axis=-1))


def narrow(g: GraphBuilder) -> tuple[str, str]:
    return cosines(g, angles(g))


def from_zero_narrow(g: GraphBuilder) -> tuple[str, str]:
    """The same for every entry of the batch."""
    length = g.op("Squeeze", g.op("Shape", "q", start=1, end=2))
    at = g.op("Cast", g.op("Range", 0, length, 1), to=1)
    return cosines(g, g.op("Unsqueeze", g.op("MatMul", g.op("Unsqueeze", at, [1]), FREQUENCIES[None]), [0]))


def from_zero(g: GraphBuilder) -> tuple[str, str]:
    cos, sin = (g.op("Concat", table, table, axis=-1) for table in from_zero_narrow(g))
    return cos, sin


def wide_frequencies(g: GraphBuilder) -> tuple[str, str]:
    at = g.op("Unsqueeze", g.op("Cast", "positions", to=1), [2])
    return cosines(g, g.op("Mul", at, np.tile(FREQUENCIES, 2)))


def scaled(g: GraphBuilder) -> tuple[str, str]:
    cos, sin = wide(g)
    return g.op("Mul", cos, 1.25), g.op("Mul", sin, 1.25)


def gathered(g: GraphBuilder) -> tuple[str, str]:
    """Rows of constant tables."""
    table = np.concatenate([LARGE, LARGE], -1)
    cos, sin = (g.op("Gather", np.ascontiguousarray(part), "positions") for part in table)
    return g.op("Unsqueeze", cos, [1]), g.op("Unsqueeze", sin, [1])


def sliced(g: GraphBuilder) -> tuple[str, str]:
    """The first rows of constant tables, then those of the positions."""
    table = np.concatenate([LARGE, LARGE], -1)
    end = g.op("Sum", g.op("Cast", g.op("ReduceMax", "positions", keepdims=0), to=1), 1.0)
    parts = (
        g.op("Slice", np.ascontiguousarray(part), [0], g.op("Unsqueeze", g.op("Cast", end, to=7), [0]), [0]) for part in table
    )
    cos, sin = (g.op("Gather", part, "positions") for part in parts)
    return g.op("Unsqueeze", cos, [1]), g.op("Unsqueeze", sin, [1])


def negative_angles(g: GraphBuilder) -> tuple[str, str]:
    """Cosines and sines of the angles, and of their opposites for the first half."""
    return cosines(g, g.op("Concat", g.op("Neg", angles(g)), angles(g), axis=-1))


def negative_table(g: GraphBuilder) -> tuple[str, str]:
    """Rows of constant tables, the sines of the first half with the other sign."""
    tables = np.concatenate([LARGE[0], LARGE[0]], -1), np.concatenate([-LARGE[1], LARGE[1]], -1)
    cos, sin = (g.op("Unsqueeze", g.op("Gather", table, "positions"), [1]) for table in tables)
    return cos, sin


def rounded_otherwise(g: GraphBuilder) -> tuple[str, str]:
    """The angles of both halves were once of other types."""
    types = onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16
    parts = [g.op("Cast", g.op("Cast", angles(g), to=dtype), to=onnx.TensorProto.FLOAT) for dtype in types]
    return cosines(g, g.op("Concat", *parts, axis=-1))


def one_table(g: GraphBuilder) -> tuple[str, str]:
    """Sines and cosines side by side in one table, each repeated for both channels of a pair."""
    rows = g.op("Gather", np.concatenate(list(LARGE), -1), "positions")
    parts = g.op("Split", rows, [4, 4], axis=-1, outputs=2)
    repeated = [g.op("Gather", part, np.repeat(np.arange(4), 2), axis=2) for part in reversed(parts)]
    return g.op("Unsqueeze", repeated[0], [1]), g.op("Unsqueeze", repeated[1], [1])


def rows_first(g: GraphBuilder) -> tuple[str, str]:
    cos, sin = (g.op("Squeeze", table, [1]) for table in wide(g))
    return g.op("Unsqueeze", cos, [2]), g.op("Unsqueeze", sin, [2])


def halves(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    other = g.op("Concat", g.op("Neg", g.slice(x, 3, 4, 8)), g.slice(x, 3, 0, 4), axis=-1)
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", other, sin))


def swapped(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    other = g.op("Mul", g.op("Gather", x, np.roll(np.arange(8), 4), axis=3), np.repeat(np.float32([-1, 1]), 4))
    return g.op("Add", g.op("Mul", sin, other), g.op("Mul", cos, x))


def chunks(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    a, b = g.op("Split", x, [4, 4], axis=-1, outputs=2)
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    second = g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin))
    return g.op("Concat", first, second, axis=-1)


def complex_numbers(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    pairs = g.op("Reshape", x, [0, 0, 0, 4, 2])
    a, b = (g.op("Gather", pairs, index, axis=4) for index in (0, 1))
    real = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    imaginary = g.op("Add", g.op("Mul", a, sin), g.op("Mul", b, cos))
    parts = [g.op("Unsqueeze", part, [4]) for part in (real, imaginary)]
    return g.op("Reshape", g.op("Concat", *parts, axis=-1), [0, 0, 0, 8])


def stacked(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    """Both halves on an axis of their own."""
    parts = g.op("Reshape", x, [0, 0, 0, 2, 4])
    a, b = (g.op("Gather", parts, index, axis=3) for index in (0, 1))
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    second = g.op("Add", g.op("Mul", a, sin), g.op("Mul", b, cos))
    both = (g.op("Unsqueeze", part, [3]) for part in (first, second))
    return g.op("Reshape", g.op("Concat", *both, axis=3), [0, 0, 0, 8])


def signed(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    """The sines have the signs, and the halves are only exchanged."""
    wide = g.op("Concat", cos, cos, axis=-1), g.op("Concat", g.op("Neg", sin), sin, axis=-1)
    return same_sign(g, x, *wide)


def every_other(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    parts = [g.op("Neg", g.slice(x, 3, 1, 8, 2)), g.slice(x, 3, 0, 8, 2)]
    other = g.op("Reshape", g.op("Concat", *(g.op("Unsqueeze", part, [-1]) for part in parts), axis=-1), [0, 0, 0, 8])
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", other, sin))


def rows_first_turned(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    return g.op("Transpose", halves(g, g.op("Transpose", x, perm=[0, 2, 1, 3]), cos, sin), perm=[0, 2, 1, 3])


def backwards(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    """By minus the angle."""
    other = g.op("Concat", g.slice(x, 3, 4, 8), g.op("Neg", g.slice(x, 3, 0, 4)), axis=-1)
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", other, sin))


def of_some(turn: Turn) -> Turn:
    """The first four channels are turned, the others stay."""

    def turned(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
        cos, sin = (g.slice(table, 3, 0, 2) for table in (cos, sin))
        return g.op("Concat", turn(g, g.slice(x, 3, 0, 4), cos, sin), g.slice(x, 3, 4, 8), axis=-1)

    return turned


def two_chunks(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    a, b = g.slice(x, 3, 0, 2), g.slice(x, 3, 2, 4)
    first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
    return g.op("Concat", first, g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin)), axis=-1)


def operator(**attributes: int) -> Turn:
    """ai.onnx RotaryEmbedding with a row of its tables for each of its own."""

    def turned(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
        cos, sin = (g.op("Squeeze", table, [1]) for table in (cos, sin))
        return g.op("RotaryEmbedding", x, cos, sin, **attributes)

    return turned


def operator_at(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    """ai.onnx RotaryEmbedding that looks positions up."""
    return g.op("RotaryEmbedding", x, *LARGE, "positions", interleaved=1)


def contrib(scale: float = 1.0) -> Turn:
    """com.microsoft RotaryEmbedding that looks positions up."""

    def turned(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
        return g.op("RotaryEmbedding", x, "positions", *LARGE, domain="com.microsoft", scale=scale)

    return turned


def contrib_offset(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    return g.op("RotaryEmbedding", x, [3], *LARGE, domain="com.microsoft")


def in_float32(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    return g.op("Cast", halves(g, g.op("Cast", x, to=onnx.TensorProto.FLOAT), cos, sin), to=onnx.TensorProto.FLOAT16)


def in_float16(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    return halves(g, x, *(g.op("Cast", table, to=onnx.TensorProto.FLOAT16) for table in (cos, sin)))


def unequal(g: GraphBuilder) -> tuple[str, str]:
    """The halves turn by different angles."""
    return cosines(g, g.op("Concat", angles(g), g.op("Mul", angles(g), 1.5), axis=-1))


def unequal_columns(g: GraphBuilder) -> tuple[str, str]:
    table = np.concatenate([LARGE, LARGE], -1)
    table[0, 3, 5] += 1
    cos, sin = (g.op("Gather", np.ascontiguousarray(part), "positions") for part in table)
    return g.op("Unsqueeze", cos, [1]), g.op("Unsqueeze", sin, [1])


def by_head(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    heads = g.op("Range", 1, g.op("Add", g.op("Squeeze", g.op("Shape", x, start=1, end=2)), 1), 1)
    return halves(g, x, g.op("Mul", cos, g.op("Reshape", g.op("Cast", heads, to=1), [1, -1, 1, 1])), sin)


def without_the_first_row(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    end = np.iinfo(np.int64).max
    rest, rest_cos, rest_sin = (g.slice(value, 2, 1, end) for value in (x, cos, sin))
    return g.op("Concat", g.slice(x, 2, 0, 1), halves(g, rest, rest_cos, rest_sin), axis=2)


def normalized(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    """Turned, then normalized: the norm is what it was only where cos² + sin² is 1."""
    turned = halves(g, x, cos, sin)
    mean = g.op("ReduceMean", g.op("Mul", turned, turned), [3], keepdims=1)
    return g.op("Mul", g.op("Div", turned, g.op("Sqrt", mean)), np.arange(8, dtype=np.float32))


def same_sign(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    other = g.op("Concat", g.slice(x, 3, 4, 8), g.slice(x, 3, 0, 4), axis=-1)
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", other, sin))


def other_heads(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    """Partners come from the head beside."""
    rolled = g.op("Concat", g.slice(x, 1, 1, np.iinfo(np.int64).max), g.slice(x, 1, 0, 1), axis=1)
    turned = g.op("Concat", g.op("Neg", g.slice(rolled, 3, 4, 8)), g.slice(rolled, 3, 0, 4), axis=-1)
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))


def other_pairs(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    other = g.op("Mul", g.op("Gather", x, np.arange(8)[::-1].copy(), axis=3), np.repeat(np.float32([-1, 1]), 4))
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", other, sin))


def of_the_last(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    cos, sin = (g.slice(table, 3, 0, 2) for table in (cos, sin))
    return g.op("Concat", g.slice(x, 3, 4, 8), two_chunks(g, g.slice(x, 3, 0, 4), cos, sin), axis=-1)


def of_an_odd_number(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    part, cos, sin = (g.slice(value, 3, 0, 5) for value in (x, cos, sin))
    other = g.op("Concat", g.op("Neg", g.slice(part, 3, 2, 5)), g.slice(part, 3, 0, 2), axis=-1)
    return g.op("Concat", g.op("Add", g.op("Mul", part, cos), g.op("Mul", other, sin)), g.slice(x, 3, 5, 8), axis=-1)


def shifted(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    return g.op("Add", halves(g, x, cos, sin), g.op("Mul", x, sin))


def of_two_values(g: GraphBuilder, x: str, cos: str, sin: str) -> str:
    y = g.op("Tanh", x)
    other = g.op("Concat", g.op("Neg", g.slice(y, 3, 4, 8)), g.slice(y, 3, 0, 4), axis=-1)
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", other, sin))
