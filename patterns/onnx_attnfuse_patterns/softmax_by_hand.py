"""Softmax in other words: `exp(x) / sum(exp(x))`, `exp(log_softmax(x))`, `exp(x - logsumexp(x))`.

    Q·Kᵀ ── Sub(max) ── Exp ─┬────────── Div ── ·V
                             └ ReduceSum ┘

Hand-written models and converters of other frameworks write it. A row's maximum that is subtracted first is a step of its own.
Safety: without that maximum a fully masked row is NaN, which `shifted=False` says; and exp overflows from scores of 88 on, where
the operator does not: that it does not happen is the assumption `finite-exponentials`. With a
logarithm of the sum such a row is one thing by ReduceLogSumExp and another by decomposed operators: `shifted=None`.
"""

import math

from onnx_attnfuse.language import (
    Equation,
    Tensor,
    any_of,
    equation,
    exp,
    log,
    log_softmax,
    pattern,
    softmax,
    sum,  # noqa: A004
    where,
)


@pattern
def softmax_by_hand(scores: Tensor) -> Equation:
    """Exponentials over their sum."""
    return equation(exp(scores) / sum(exp(scores)), softmax(scores, shifted=False))


@pattern
def softmax_by_difference(scores: Tensor) -> Equation:
    """Exponentials of scores less the logarithm of their sum."""
    return equation(exp(scores - log(sum(exp(scores)))), softmax(scores, shifted=None))


@pattern
def softmax_of_logarithms(scores: Tensor) -> Equation:
    """Exponentials of a logarithmic softmax."""
    return equation(exp(log_softmax(scores)), softmax(scores))


@pattern
def softmax_divided_late(scores: Tensor, v: Tensor) -> Equation:
    """Values are summed by exponentials, and the sums divided by those of the exponentials."""
    return equation(exp(scores) @ v / sum(exp(scores)), softmax(scores, shifted=False) @ v)


@pattern
def softmax_of_base_two(scores: Tensor) -> Equation:
    """Powers of two over their sum."""
    return equation(2**scores / sum(2**scores), softmax(scores * math.log(2), shifted=False))


@pattern(priority=-1)  # without a mask it is the first one
def softmax_masked_late(scores: Tensor, kept: Tensor) -> Equation:
    """Exponentials are masked and divided by the sum of the rest."""
    left, weights = (
        any_of("mask", product=found * kept, chosen=where(kept, found, 0), other=where(kept, 0, found))
        for found in (exp(scores), softmax(scores))
    )
    return equation(left / sum(left), weights / sum(weights))
