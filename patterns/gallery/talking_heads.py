"""Talking heads (arXiv:2003.02436; CaiT): heads are mixed before or after the softmax. Refused: no fused operator mixes heads."""

from onnx_attnfuse.language import Tensor, any_of, mix_heads, pattern, refusal, softmax


@pattern
def talking_heads(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, scale: Tensor, mask: Tensor):
    """Recognised, so that the report says what it is and not merely where reading ended."""
    scores = scale * (q @ k.T)
    weights = any_of("mixed", after=mix_heads(softmax(scores + mask), mix), before=softmax(mix_heads(scores, mix) + mask))
    return refusal(weights @ v, code="talking-heads", message="its heads are mixed inside, which no fused operator does")
