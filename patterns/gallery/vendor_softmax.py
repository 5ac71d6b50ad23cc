"""A vendor's operator that scales, masks and normalises in one, as Megatron's training kernels do.

    acme::ScaledMaskedSoftmax(scores, mask)        mask is true where a key must not be seen

Safety: what it forbids gets -10000 in the place of its score, so a row without a key is uniform; a definition has to say so.
"""

import numpy as np

from onnx_attnfuse.language import Tensor, operator, softmax, where


def reference(scores, mask, *, scale):
    """As the vendor documents it."""
    scores = np.where(mask, np.float32(-10000), scores * np.float32(scale))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@operator("acme::ScaledMaskedSoftmax", reference=reference)
def scaled_masked_softmax(scores: Tensor, mask: Tensor, *, scale: float):
    """The definition; the reference says whether it is right."""
    return softmax(where(mask, -10000.0, scale * scores))
