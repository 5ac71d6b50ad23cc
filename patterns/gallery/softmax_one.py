"""Softmax with one more in the denominator ("attention is off by one"): a row may attend to nothing.

    exp(s) / (1 + Σ exp(s)) · v          a sink whose score is 0

Safety: where the row's maximum is subtracted first, the one has to be exp(-maximum); a plain 1 is another function.
"""

from onnx_attnfuse.language import Tensor, any_of, equation, exp, max, pattern, softmax, sum


@pattern
def softmax_one(scores: Tensor, v: Tensor):
    """The one is the weight of a key that scores 0 and has no value."""
    shifted = exp(scores - max(scores))
    weights = any_of(
        "form",
        plain=exp(scores) / (1 + sum(exp(scores))),
        shifted=shifted / (exp(-max(scores)) + sum(shifted)),
    )
    return equation(written=weights @ v, meaning=softmax(scores, sink=0) @ v)
