"""Differential Transformer (arXiv:2410.05258): the difference of two softmax attentions over the same values.

(softmax(q1·k1ᵀ) - λ·softmax(q2·k2ᵀ)) · v
"""

from onnx_attnfuse.language import Tensor, equation, pattern, softmax


@pattern
def differential(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor, scale: Tensor, mask: Tensor):
    """A product distributes over a difference, so each half is an attention."""
    first = softmax(scale * (q1 @ k1.T) + mask)
    second = softmax(scale * (q2 @ k2.T) + mask)
    return equation(written=(first - weight * second) @ v, meaning=first @ v - weight * (second @ v))
