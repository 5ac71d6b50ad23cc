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
| k_scale, v_scale | one number, or one for each channel, (1, m, 1, h): the cache is quantised, and read by all rows |
| q_norm_weight, k_norm_weight | (h): each head of queries and keys over its root mean square, times these, before it is turned |

With as many queries as the longest entry has keys it is a prompt: nothing is past, and rows behind the length of their entry are
left open by the operator. They are 0 here. The presents hold there what was handed over, as in ONNX Runtime's CPU kernel.
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.kernels.cache_formats import FORMATS, CacheFormat
from onnx_attnfuse.verify.references.caches import appended, lengths
from onnx_attnfuse.verify.references.core import (
    Array,
    Operator,
    Results,
    capped,
    in_float32,
    merge_heads,
    places,
    repeat_heads,
    scores,
    softmax,
    split_heads,
)
from onnx_attnfuse.verify.references.masking import seen
from onnx_attnfuse.verify.references.quantised_cache import quantised, restored
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
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    causal: int = 1,
    local_window_size: int = -1,
    softcap: float = 0.0,
    smooth_softmax: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    qk_norm_epsilon: float = 1e-6,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
) -> Results:
    """The output and both presents, (b, m, t, h).

    Raises:
        ValueError: What is given does not fit together.
    """
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("GroupQueryAttention takes weights of normalization for queries and keys, or for neither")
    if local_window_size != -1 and (local_window_size < 1 or not causal):
        raise ValueError(f"local_window_size {local_window_size} with causal {causal}")
    queries, keys, values = _operands(query, key, value, num_heads, kv_num_heads)
    queries, keys = _normalized(queries, q_norm_weight, qk_norm_epsilon), _normalized(keys, k_norm_weight, qk_norm_epsilon)
    starts, ends, longest = lengths(seqlens_k, total_sequence_length, queries.shape[2])
    if do_rotary and cos_cache is not None and sin_cache is not None:
        positions = starts[:, None] + places(queries.shape[2]) if position_ids is None else position_ids
        queries = rotated(queries, positions, cos_cache, sin_cache, interleaved=bool(rotary_interleaved))
        keys = rotated(keys, positions, cos_cache, sin_cache, interleaved=bool(rotary_interleaved))
    caches = (
        _Cache(past_key, k_scale, k_quant_type, kv_cache_bit_width, keys.shape),
        _Cache(past_value, v_scale, v_quant_type, kv_cache_bit_width, values.shape),
    )
    presents = caches[0].appended(keys, starts, longest), caches[1].appended(values, starts, longest)
    keys, values = (repeat_heads(cache.read(item), num_heads) for cache, item in zip(caches, presents, strict=True))
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


class _Cache:
    """Keys or values as the operator keeps them: as they are, or quantised.

    Raises:
        ValueError: The scales do not fit.
    """

    def __init__(self, past: Array | None, scale: Array | None, kind: str, bits: int, shape: tuple[int, ...]) -> None:
        self._past, self._size = past, shape[3]
        self._form = None if kind == "NONE" else _form(past, bits)
        counts = {"NONE": 0, "PER_TENSOR": 1, "PER_CHANNEL": shape[1] * shape[3]}
        if (0 if scale is None else scale.size) != counts.get(kind):
            raise ValueError(f"{0 if scale is None else scale.size} scales, and {kind} wants {counts.get(kind)}")
        self._scale = np.ones(1, np.float32) if scale is None else scale.reshape(1, shape[1] if scale.size > 1 else 1, 1, -1)

    def appended(self, fresh: Array, starts: Array, longest: int) -> Array:
        fresh = fresh if self._form is None else quantised(fresh, self._scale, self._form)
        return appended(self._past, fresh, starts, longest)

    def read(self, present: Array) -> Array:
        return present if self._form is None else restored(present, self._scale, self._form, self._size)


def _form(past: Array | None, bits: int) -> CacheFormat:
    """The format of a quantised cache, by its past or else by its width.

    Raises:
        ValueError: There is none like it.
    """
    for form in FORMATS.values():
        if form.bits == bits and (past is None or form.dtype.numpy() == past.dtype):
            return form
    raise ValueError(f"there is no quantised cache of {bits} bits in {None if past is None else past.dtype}")


def _operands(query: Array, key: Array | None, value: Array | None, heads: int, kv_heads: int) -> tuple[Array, ...]:
    """All three as (b, n or m, s, h)."""
    if key is not None and value is not None:
        return split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
    packed = split_heads(query, heads + 2 * kv_heads)
    return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]


def _normalized(heads: Array, weight: Array | None, epsilon: float) -> Array:
    """Each head over its root mean square, times the weights; as it is without them."""
    return heads if weight is None else heads / np.sqrt(np.mean(heads * heads, -1, keepdims=True) + epsilon) * weight


class GroupQueryAttention(Operator):
    """The operator GroupQueryAttention for onnx's evaluator."""

    compute = staticmethod(group_query_attention)
