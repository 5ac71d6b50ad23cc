"""com.microsoft.Attention: projects queries, keys and values, then does what MultiHeadAttention does.

| input | shape |
|---|---|
| input, weights, bias | (b, s, i), (i, 2·n·h + n·v), (2·n·h + n·v); `qkv_hidden_sizes` tells h and v apart |
| mask_index | lengths (b) or (3b + 2), ends and starts (2b), 0 and 1 as (b, t) or (b, s, t); (b, 1) and (1, 1) stand for none |
| past | (2, b, n, p, h), then t = p + s |
| attention_bias | (b or 1, n or 1, s, t) |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_attnfuse.verify.references.core import (
    Array,
    Operator,
    Results,
    in_float32,
    merge_heads,
    scores,
    softmax,
    split_heads,
)
from onnx_attnfuse.verify.references.masking import masked


@in_float32
def attention(
    input: Array,  # noqa: A002 - its name in the schema
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Sequence[int] | None = None,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    unidirectional: int = 0,
) -> Results:
    """The output, and keys and values as (2, b, n, t, h) where they are of one size."""
    queries, keys, values = (split_heads(part, num_heads) for part in projected(input, weights, bias, qkv_hidden_sizes))
    if past is not None:
        keys, values = np.concatenate([past[0], keys], axis=2), np.concatenate([past[1], values], axis=2)
    logits = scores(queries, keys, scale)
    if attention_bias is not None:
        logits = logits + attention_bias
    mask = None if mask_index is None or (mask_index.ndim == 2 and mask_index.shape[1] == 1) else mask_index
    logits = masked(logits, mask, mask_filter_value, unidirectional=bool(unidirectional))
    output = merge_heads(softmax(logits) @ values)
    return (output, np.stack([keys, values])) if keys.shape == values.shape else (output,)


def projected(tokens: Array, weights: Array, bias: Array | None, sizes: Sequence[int] | None) -> list[Array]:
    """Queries, keys and values of tokens (..., i)."""
    product = tokens @ weights
    product = product if bias is None else product + bias
    width = weights.shape[1] // 3 if sizes is None else sizes[0]
    return np.split(product, [width, 2 * width], axis=-1)


class Attention(Operator):
    """The operator Attention for onnx's evaluator."""

    compute = staticmethod(attention)
