"""Softmax in other words: `exp(x) / sum(exp(x))`, `exp(log_softmax(x))`, `exp(x - logsumexp(x))`.

    Q·Kᵀ ── Sub(max) ── Exp ─┬────────── Div ── ·V
                             └ ReduceSum ┘

Hand-written models and converters of other frameworks write it. A row's maximum that is subtracted first is a step of its own.
Safety: without that maximum exp overflows from scores of 88 on, where the operator does not.
"""

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
)


@pattern
def softmax_spelled_out(scores: Tensor) -> Equation:
    """Exponentials over their sum, or of logarithms."""
    weights = any_of(
        "form",
        quotient=exp(scores) / sum(exp(scores)),
        logarithms=exp(log_softmax(scores)),
        difference=exp(scores - log(sum(exp(scores)))),
    )
    return equation(weights, softmax(scores))
