"""com.microsoft.PackedAttention: projects queries, keys and values, then computes PackedMultiHeadAttention.

| input | shape |
|---|---|
| input, weights, bias | (tokens, i), (i, 2·n·h + n·v), (2·n·h + n·v); `qkv_hidden_sizes` tells h and v apart |
| token_offset, cumulative_sequence_length | (b, s), (b + 1), as RemovePadding gives them |
| attention_bias | (b or 1, n or 1, s, s) |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results, in_float32
from onnx_attnfuse.verify.references.packed_multi_head_attention import by_entry


@in_float32
def packed_attention(
    input: Array,  # noqa: A002 - its name in the schema
    weights: Array,
    bias: Array,
    token_offset: Array,
    cumulative_sequence_length: Array,
    attention_bias: Array | None = None,
    *,
    num_heads: int,
    qkv_hidden_sizes: Sequence[int] | None = None,
    scale: float = 0.0,
) -> Results:
    """The output (tokens, n·v)."""
    width = weights.shape[1] // 3 if qkv_hidden_sizes is None else qkv_hidden_sizes[0]
    query, key, value = np.split(input @ weights + bias, [width, 2 * width], axis=-1)
    return (by_entry(query, key, value, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale),)


class PackedAttention(Operator):
    """The operator PackedAttention for onnx's evaluator."""

    compute = staticmethod(packed_attention)
