"""An attention in operators of the standard, in the one order that all fused ones compute in.

    scale · q·kᵀ, capped, plus the bias, -inf where masked, a sink beside them, softmax, · v

Products are computed in the type of the operands, scores and weights in float32 at least, as kernels do. Of the scale of a half
type the power of two goes to the queries, which rounds nothing and keeps the product from overflowing; the rest to the scores.

Other bodies share its pieces: heads, positions, masks as truth values and as a bias, root mean squares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import widened
from onnx_attnfuse.graph.facts_view import broadcast
from onnx_attnfuse.graph.sizes import Dim, Size

INTEGER, TRUTH = ir.DataType.INT64, ir.DataType.BOOL
BY_HEAD = (0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Inputs and settings of one attention, whichever fused operator it comes from."""

    query: ir.Value
    """(b, n, s, h)."""
    key: ir.Value
    """(b, m, t, h), m a divisor of n."""
    value: ir.Value
    """(b, m, t, v)."""
    dtype: ir.DataType
    heads: int
    size: int
    """The head size of queries and keys, h."""
    scale: float | None = None
    """None, or 0: one over the root of the head size."""
    softcap: float = 0.0
    """Scores stay within ±this; 0 caps nothing."""
    added: tuple[ir.Value, ...] = ()
    """Biases that are added to the scores, one after the other; of any float type, broadcasting to (b, n, s, t)."""
    seen: ir.Value | None = None
    """Truth values that broadcast to (b, n, s, t): the keys that a row sees."""
    sink: ir.Value | None = None
    """(n): one more score in each row, which takes weight and has no value."""
    empty_is_zero: bool = False
    """Whether rows may see nothing and then give 0."""


@dataclasses.dataclass(frozen=True)
class DecomposedAttention:
    """A decomposed attention: its result, and the scores at every stage."""

    result: ir.Value
    """(b, n, s, v)."""
    raw: ir.Value
    """(b, n, s, t): the scaled scores; the same after the cap, after the mask, and as weights."""
    capped: ir.Value
    masked: ir.Value
    weights: ir.Value


def decompose(build: Builder, problem: AttentionInputs) -> DecomposedAttention:
    """Builds the attention."""
    wide = widened(problem.dtype)
    raw = _scores(build, problem, wide)
    capped = raw
    if problem.softcap:
        cap = build.scalar(problem.softcap, wide)
        ratio = build.elementwise("Div", [raw, cap], wide)
        capped = build.elementwise("Mul", [build.node("Tanh", [ratio], dims=dims_of(build, ratio), dtype=wide), cap], wide)
    masked = capped
    for item in problem.added:
        masked = build.elementwise("Add", [masked, build.cast(item, wide)], wide)
    if problem.seen is not None:
        masked = chosen(build, problem.seen, masked, build.scalar(-math.inf, wide))
    weights = _weights(build, problem, masked)
    value = repeat_heads(build, problem.value, problem.heads)
    dims = (*dims_of(build, weights)[:-1], dims_of(build, value)[-1])
    result = build.node("MatMul", [build.cast(weights, problem.dtype), value], dims=dims, dtype=problem.dtype)
    return DecomposedAttention(result, raw, capped, masked, weights)


def _scores(build: Builder, problem: AttentionInputs, wide: ir.DataType) -> ir.Value:
    query, scale = problem.query, problem.scale or 1 / math.sqrt(problem.size)
    if wide != problem.dtype:
        scale, exponent = math.frexp(scale)
        scale, power = 2 * scale, math.ldexp(1.0, exponent - 1)
        query = _times(build, query, power, problem.dtype)
    key = build.transpose(repeat_heads(build, problem.key, problem.heads), (0, 1, 3, 2))
    dims = (*dims_of(build, query)[:-1], dims_of(build, key)[-1])
    product = build.node("MatMul", [query, key], dims=dims, dtype=problem.dtype)
    return _times(build, build.cast(product, wide), scale, wide)


def _times(build: Builder, value: ir.Value, factor: float, dtype: ir.DataType) -> ir.Value:
    return value if factor == 1 else build.elementwise("Mul", [value, build.scalar(factor, dtype)], dtype)


def _weights(build: Builder, problem: AttentionInputs, scores: ir.Value) -> ir.Value:
    """The softmax along the keys, without the column of a sink."""
    wide, dims = build.facts.dtype(scores), dims_of(build, scores)
    if problem.sink is not None:
        assert wide is not None
        by_head = build.reshape(build.cast(problem.sink, wide), (1, problem.heads, 1, 1))
        beside = build.expand(by_head, (dims[0], problem.heads, dims[2], 1), [True, False, True, False])
        scores = joined(build, [scores, beside], 3)
    weights = build.node("Softmax", [scores], {"axis": -1}, dims=dims_of(build, scores), dtype=wide)
    if problem.sink is not None:
        weights = build.slice(weights, 3, 0, dims[3])
    if problem.empty_is_zero:
        lost = build.node("IsNaN", [weights], dims=dims, dtype=TRUTH)
        weights = chosen(build, lost, build.scalar(0.0, wide), weights)
    return weights


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
