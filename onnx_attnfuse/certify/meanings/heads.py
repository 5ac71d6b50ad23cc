"""Parts that the meanings of attention operators share: heads, scores, what a row sees, and what is summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays, sums
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.magnitudes import LOWEST, absorbed, is_small
from onnx_attnfuse.certify.softmaxes import function, weight
from onnx_attnfuse.certify.terms import NAN, NINF, ZERO, Term, add, fresh, ite, multiply, number, product

Score = Callable[[Term, Term, Term, Term], Term]
"""The score of batch entry, head, row and key."""


def split_heads(array: Array, heads: int) -> Array:
    """(b, s, n·h) as (b, n, s, h)."""
    width = arithmetic.exact_quotient(array.shape[2], number(heads))
    if width is None:
        raise Unsupported(f"{heads} heads in {array.shape[2]} channels")
    flat = arrays.reshaped(array, [*array.shape[:2], number(heads), width])
    return arrays.permuted(flat, [0, 2, 1, 3])


def merge_heads(array: Array) -> Array:
    """(b, n, s, h) as (b, s, n·h)."""
    turned = arrays.permuted(array, [0, 2, 1, 3])
    return arrays.reshaped(turned, [*turned.shape[:2], product(turned.shape[2:])])


def repeat_heads(array: Array, heads: Term) -> Array:
    """(b, m, t, h) with each head as often as it serves one of `heads` heads."""
    times = arithmetic.exact_quotient(heads, array.shape[1])
    if times is None:
        raise Unsupported(f"{array.shape[1]} heads of keys for {heads} of queries")
    shape = [array.shape[0], heads, *array.shape[2:]]
    return Array(shape, array.dtype, lambda at: array.at(at[0], arithmetic.divide(at[1], times), *at[2:]))


def behind(past: Array | None, fresh_part: Array) -> Array:
    """Keys or values with earlier ones in front."""
    return fresh_part if past is None else arrays.concatenated([past, fresh_part], 2)


def products(queries: Array, keys: Array, scale: float | None) -> Score:
    """Scaled products of queries and keys, both (b, n, ., h); no scale, or 0, is one over the root of the head size."""
    width, other = queries.shape[3], keys.shape[3]
    if width.op == other.op == "const" and width is not other:
        raise Unsupported("queries and keys of other head sizes")
    if not scale:
        if width.op != "const":
            raise Unsupported("heads of an unknown size without a scale")
        scale = 1 / math.sqrt(int(width.data))
    factor = number(scale, "Real")

    def score(b: Term, n: Term, i: Term, j: Term) -> Term:
        bound = fresh(width)
        return multiply(factor, sums.total(bound, multiply(queries.at(b, n, i, bound), keys.at(b, n, j, bound))))

    return score


def capped(score: Term, cap: float) -> Term:
    """A score within ±`cap`; 0 caps nothing."""
    if not cap:
        return score
    return multiply(number(cap, "Real"), function("tanh", multiply(score, number(1 / number(cap, "Real").data, "Real"))))


def attended(score: Score, values: Array, rows: Term, empty: Term = NAN, sink: Callable[[Term], Term] | None = None) -> Array:
    """The values (b, n, t, v) of all keys, weighed by the softmax of the scores of a row: (b, n, s, v)."""
    shape = [*values.shape[:2], rows, values.shape[3]]

    def read(at: Index) -> Term:
        b, n, i, channel = at
        bound = fresh(values.shape[2])
        extra = None if sink is None else sink(n)
        share = weight(lambda j: score(b, n, i, j), values.shape[2], bound, empty, extra)
        return sums.total(bound, multiply(share, values.at(b, n, bound, channel)))

    return Array(shape, values.dtype, read)


def unseen(term: Term, dtype: ir.DataType) -> Term:
    """A number of a mask, minus infinity where it is the lowest of its type."""
    if term.op == "ite":
        return ite(term.args[0], unseen(term.args[1], dtype), unseen(term.args[2], dtype))
    lowest, found = number(LOWEST.get(dtype, 0.0), "Real"), absorbed(term)
    if dtype not in LOWEST or is_small(found):
        return term
    return ite(arithmetic.equals(found, lowest), NINF, term)


def before(row: Term, key: Term, offset: Term = ZERO) -> Term:
    """Whether a key is at most `offset` behind a row's number."""
    return arithmetic.at_most(key, add(row, offset))


def lengths(array: Array) -> Sequence[Term]:
    """The shape of queries, keys or values as (b, n, t, h)."""
    return array.shape
