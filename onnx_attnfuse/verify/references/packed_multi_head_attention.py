"""com.microsoft.PackedMultiHeadAttention: attention of every entry with itself, over tokens without padding.

| input | shape |
|---|---|
| query, key, value | (tokens, n·h), (tokens, n·h), (tokens, n·v); or all three as (tokens, n, 3, h) |
| bias | (2·n·h + n·v), of the projections |
| token_offset, cumulative_sequence_length | (b, s), (b + 1), as RemovePadding gives them |
| attention_bias | (b or 1, n or 1, s, s) |

`mask_filter_value` is for padding, of which nothing is left.
"""

from __future__ import annotations

import itertools

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results, in_float32, merge_heads, scores, softmax, split_heads


@in_float32
def packed_multi_head_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    bias: Array | None,
    token_offset: Array,
    cumulative_sequence_length: Array,
    attention_bias: Array | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = 0.0,
) -> Results:
    """The output (tokens, n·v).

    Raises:
        ValueError: The arguments do not fit together.
    """
    del mask_filter_value
    if query.ndim == 4:
        query, key, value = (part.reshape(len(part), -1) for part in np.moveaxis(query, -2, 0))
    if key is None or value is None:
        raise ValueError("keys or values are missing")
    if bias is not None:
        width = query.shape[1]
        query, key, value = query + bias[:width], key + bias[width : 2 * width], value + bias[2 * width :]
    return (by_entry(query, key, value, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale),)


def by_entry(
    query: Array,
    key: Array,
    value: Array,
    offsets: Array,
    starts: Array,
    attention_bias: Array | None,
    heads: int,
    scale: float,
) -> Array:
    """Attention within the tokens of each entry, (tokens, n·v); rows after the last entry are of none, and NaN.

    Raises:
        ValueError: The places where entries start are none for as many tokens.
    """
    if starts[0] != 0 or starts[-1] > len(query) or (np.diff(starts) < 0).any() or len(starts) != len(offsets) + 1:
        raise ValueError(f"{len(offsets)} entries that start at {starts.tolist()} are not of {len(query)} tokens")
    results: list[Array] = [value[:0]]
    for entry, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        queries, keys, values = (split_heads(item[None, start:end], heads) for item in (query, key, value))
        logits = scores(queries, keys, scale)
        if attention_bias is not None:
            logits = logits + attention_bias[None, entry % len(attention_bias), :, : end - start, : end - start]
        results.append(merge_heads(softmax(logits) @ values)[0])
    return np.concatenate([*results, np.full_like(value[starts[-1] :], np.nan)])


class PackedMultiHeadAttention(Operator):
    """The operator PackedMultiHeadAttention for onnx's evaluator."""

    compute = staticmethod(packed_multi_head_attention)
