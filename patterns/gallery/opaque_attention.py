"""A whole attention in one operator of a vendor, (batch, sequence, heads · channels) in and out.

acme::Attn<num_heads, scale>(query, key, value, mask?)
"""

from onnx_attnfuse.language import Tensor, operator, rearrange, softmax


def heads(x: Tensor, n: int) -> Tensor:
    """Heads as an axis of their own."""
    return rearrange(x, "b s (n h) -> b n s h", n=n)


@operator("acme::Attn")
def attn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, num_heads: int, scale: float = 1.0):
    """Without a reference the definition is believed."""
    scores = scale * (heads(query, num_heads) @ heads(key, num_heads).T)
    weights = softmax(scores if mask is None else scores + mask)
    return rearrange(weights @ heads(value, num_heads), "b n s h -> b s (n h)")
