"""com.microsoft.MultiHeadAttention.

| input | shape |
|---|---|
| query, key, value | (b, s, n·h), (b, l, n·h), (b, l, n·v), or the last two as (b, n, l, h) |
| packed | keys and values (b, l, n, 2, h), or all three (b, s, n, 3, h) |
| bias | (2·n·h + n·v), of the projections |
| key_padding_mask | lengths (b) or (3b + 2), or 0 and 1 as (b, t) or (b, s, t) |
| attention_bias | (b or 1, n or 1, s, t) |
| past_key, past_value | (b, n, p, h), then t = p + l |

What kernels disagree on: rows that see no key, and the triangle where there are more queries than keys or fewer. Here such a row
is what ONNX Runtime's CPU makes of it, and such a triangle is refused.
"""

from __future__ import annotations

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
def multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = -10000.0,
    unidirectional: int = 0,
) -> Results:
    """The output, both presents as (b, n, t, h), and the scores as they go into the softmax.

    Raises:
        ValueError: What is given does not fit together, or kernels disagree on it.
    """
    if key_padding_mask is not None and key_padding_mask.shape == (2 * len(query),):
        raise ValueError("ends and starts are a mask of Attention only")
    queries, keys, values = _operands(query, key, value, bias, num_heads)
    rows = queries.shape[2]
    if unidirectional and rows not in {1, keys.shape[2]}:
        raise ValueError(f"kernels disagree on the triangle of {rows} queries and {keys.shape[2]} keys")
    if past_key is not None and past_value is not None:
        keys, values = np.concatenate([past_key, keys], axis=2), np.concatenate([past_value, values], axis=2)
    logits = scores(queries, keys, scale)
    if attention_bias is not None:
        logits = logits + attention_bias
    logits = masked(logits, key_padding_mask, mask_filter_value, unidirectional=bool(unidirectional))
    return merge_heads(softmax(logits) @ values), keys, values, logits


def _operands(query: Array, key: Array | None, value: Array | None, bias: Array | None, heads: int) -> tuple[Array, Array, Array]:
    """All three as (b, n, s, h), with the biases of their projections."""
    if query.ndim == 5:
        query, key, value = unpacked(query)
    elif key is not None and key.ndim == 5:
        key, value = unpacked(key)
    if key is None or value is None:
        raise ValueError("keys or values are missing")
    width = query.shape[-1]
    if bias is not None:
        query = query + bias[:width]
    queries = split_heads(query, heads)
    if key.ndim == 4:  # who computed these once for all queries has added the biases
        return queries, key, value
    if bias is not None:
        key, value = key + bias[width : 2 * width], value + bias[2 * width :]
    return queries, split_heads(key, heads), split_heads(value, heads)


def unpacked(packed: Array) -> list[Array]:
    """(..., n, parts, h) as its parts (..., n·h)."""
    parts = np.moveaxis(packed, -2, 0)
    return [part.reshape(*part.shape[:-2], -1) for part in parts]


class MultiHeadAttention(Operator):
    """The operator MultiHeadAttention for onnx's evaluator."""

    compute = staticmethod(multi_head_attention)
