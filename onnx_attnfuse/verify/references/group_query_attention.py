"""com.microsoft.GroupQueryAttention.

| input | shape |
|---|---|
| query, key, value | (b, s, n·h), (b, s, m·h), (b, s, m·h); or all three as (b, s, (n + 2m)·h) |
| past_key, past_value | (b, m, p, h); an entry's own past comes first, what is behind it is not read |
| seqlens_k, total_sequence_length | (b), the place of the last key of each entry; the length of the longest |
| cos_cache, sin_cache | (positions, half of the channels that are turned), the first of a head if not all are |
| position_ids | (b, s); if absent, positions go on after the past |
| attention_bias | (b or 1, n or 1, s, t), added after the cap |
| head_sink | (n), a logit in every row besides those of the keys; `smooth_softmax` is a sink of 0 |

With as many queries as the longest entry has keys it is a prompt: nothing is past, and rows behind the length of their entry are
left open by the operator. They are 0 here. The presents hold there what was handed over, as in ONNX Runtime's CPU kernel.
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.caches import appended, lengths
from onnx_attnfuse.verify.references.core import (
    Array,
    Operator,
    Results,
    capped,
    in_float32,
    merge_heads,
    places,
    refuse,
    repeat_heads,
    scores,
    softmax,
    split_heads,
)
from onnx_attnfuse.verify.references.masking import seen
from onnx_attnfuse.verify.references.rotary_embedding import rotated


@in_float32
def group_query_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    *unknown: Array | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    causal: int = 1,
    local_window_size: int = -1,
    softcap: float = 0.0,
    smooth_softmax: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    qk_norm_epsilon: float = 0.0,
    **others: object,
) -> Results:
    """The output and both presents, (b, m, t, h).

    Raises:
        ValueError: What is given does not fit together.
    """
    del qk_norm_epsilon  # of weights that are not known
    refuse("GroupQueryAttention", **{f"input {12 + place}": item for place, item in enumerate(unknown)}, **others)
    if local_window_size != -1 and (local_window_size < 1 or not causal):
        raise ValueError(f"local_window_size {local_window_size} with causal {causal}")
    queries, keys, values = _operands(query, key, value, num_heads, kv_num_heads)
    starts, ends, longest = lengths(seqlens_k, total_sequence_length, queries.shape[2])
    if do_rotary and cos_cache is not None and sin_cache is not None:
        positions = starts[:, None] + places(queries.shape[2]) if position_ids is None else position_ids
        queries = rotated(queries, positions, cos_cache, sin_cache, interleaved=bool(rotary_interleaved))
        keys = rotated(keys, positions, cos_cache, sin_cache, interleaved=bool(rotary_interleaved))
    presents = appended(past_key, keys, starts, longest), appended(past_value, values, starts, longest)
    keys, values = (repeat_heads(present, num_heads) for present in presents)
    sink = np.zeros(num_heads, queries.dtype) if head_sink is None and smooth_softmax == 1 else head_sink
    sink = None if sink is None else sink[:, None, None]
    output = np.zeros_like(queries)
    for entry, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        rows = slice(0, end - start)
        logits = capped(scores(queries[entry, :, rows], keys[entry, :, :end], scale), softcap)
        if attention_bias is not None:
            logits = logits + attention_bias[entry % len(attention_bias), :, rows, :end]
        visible = seen(end - start, end, start, causal=bool(causal), window=local_window_size)
        weights = softmax(np.where(visible, logits, -np.inf), sink=sink, empty=0)
        output[entry, :, rows] = weights @ values[entry, :, :end]
    return merge_heads(output), *presents


def _operands(query: Array, key: Array | None, value: Array | None, heads: int, kv_heads: int) -> tuple[Array, ...]:
    """All three as (b, n or m, s, h)."""
    if key is not None and value is not None:
        return split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
    packed = split_heads(query, heads + 2 * kv_heads)
    return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]


class GroupQueryAttention(Operator):
    """The operator GroupQueryAttention for onnx's evaluator."""

    compute = staticmethod(group_query_attention)
