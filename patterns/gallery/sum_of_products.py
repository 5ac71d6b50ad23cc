"""Scores that are the sum of two products, as in DeepSeek's latent attention: content, and positions that all heads share.

    softmax(q1·k1ᵀ + q2·k2ᵀ) · v        one product of queries and keys that are put side by side

Without it the second product goes to the kernel as a bias of S×T numbers, which keeps it from being a flash kernel.
"""

from onnx_attnfuse.language import Tensor, concat, equation, pattern, softmax


@pattern
def sum_of_products(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, scale: Tensor, mask: Tensor):
    """A sum over channels may be split anywhere."""
    written = softmax(scale * (q1 @ k1.T + q2 @ k2.T) + mask) @ v
    meaning = softmax(scale * (concat(q1, q2) @ concat(k1, k2).T) + mask) @ v
    return equation(written, meaning)
