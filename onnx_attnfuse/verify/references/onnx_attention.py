"""ai.onnx Attention, opsets 23 to 25, as ONNX Runtime computes it.

| input | shape |
|---|---|
| Q, K, V | (b, n, s, h), (b, m, l, h), (b, m, l, v); or (b, s, n·h) and so on, with `q_num_heads` and `kv_num_heads` |
| attn_mask | true where a key is seen, or added; broadcasts to (b, n, s, t), or to its first keys, and no other is seen |
| past_key, past_value | (b, m, p, h), (b, m, p, v), then t = p + l |
| nonpad_kv_seqlen | (b), how many keys of an entry count |

onnx's own reference differs: a row that sees nothing gives 0, and the kernel takes the lowest number of the mask's type for not
seen, too. It runs masks of full length only; in those that it refuses the lowest number is a number, as in the standard. Until
1.22 onnx's also gave NaN for such rows, and for truth values under the triangle; 1.18 left the past out of the triangle.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

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
from onnx_attnfuse.verify.references.masking import before

_AFTER_CAP, _AFTER_MASK, _WEIGHTS = 1, 2, 3
"""What `qk_matmul_output_mode` asks for in place of scaled scores."""


def _with_unseen(mask: Array, query: Array, key: Array, rest: tuple[Array | None, ...]) -> Array:
    """The mask with -inf for what ONNX Runtime takes as that."""
    past = rest[0].shape[2] if rest and rest[0] is not None else 0
    if mask.shape[-2:] != (query.shape[-2], past + key.shape[-2]):
        return mask
    lowest = np.nextafter(np.asarray(-np.inf, mask.dtype), np.asarray(0, mask.dtype))  # also of bfloat16
    return np.where(np.equal(mask, lowest), np.asarray(-np.inf, mask.dtype), mask)


@in_float32
def _attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: int = 0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softcap: float = 0.0,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Results:
    del softmax_precision  # float32 at least, as in the kernels
    if scale is not None and scale <= 0:
        raise ValueError(f"a scale of {scale}")
    is_flat = query.ndim == 3
    if is_flat:
        if q_num_heads is None or kv_num_heads is None:
            raise ValueError("the numbers of heads are missing")
        query, key, value = split_heads(query, q_num_heads), split_heads(key, kv_num_heads), split_heads(value, kv_num_heads)
    offset: int | Array = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
    heads, rows, columns = query.shape[1], query.shape[2], key.shape[2]
    raw = scores(query, repeat_heads(key, heads), scale)
    cut = capped(raw, softcap)
    logits = cut if mask is None else cut + _padded(mask, columns)
    if nonpad_kv_seqlen is not None:
        lengths = np.reshape(nonpad_kv_seqlen, (-1, 1, 1, 1))
        offset = lengths - rows
        logits = np.where(places(columns) < lengths, logits, -np.inf)
    if is_causal or right_window_size >= 0:
        ahead = 0 if is_causal else right_window_size
        logits = np.where(before(rows, columns, offset + ahead), logits, -np.inf)
    if left_window_size >= 0:
        logits = np.where(before(rows, columns, offset - left_window_size - 1), -np.inf, logits)
    weights = softmax(logits, empty=0)
    output = weights @ repeat_heads(value, heads)
    asked = {_AFTER_CAP: cut, _AFTER_MASK: logits, _WEIGHTS: weights}.get(qk_matmul_output_mode, raw)
    return merge_heads(output) if is_flat else output, key, value, asked


@functools.wraps(_attention)
def onnx_attention(query: Array, key: Array, value: Array, mask: Array | None = None, *rest: Any, **attributes: Any) -> Results:
    """The output, both presents (b, m, t, h), and scores or weights."""
    if mask is not None:
        mask = np.where(mask, 0, -np.inf).astype(query.dtype) if mask.dtype == np.bool_ else _with_unseen(mask, query, key, rest)
    return _attention(query, key, value, mask, *rest, **attributes)


def _padded(mask: Array, columns: int) -> Array:
    """A mask for the first keys only, with the others not seen."""
    missing = columns - mask.shape[-1]
    return mask if missing <= 0 else np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=-np.inf)


class Attention(Operator):
    """The operator Attention for onnx's evaluator."""

    op_domain = ""
    compute = staticmethod(onnx_attention)
