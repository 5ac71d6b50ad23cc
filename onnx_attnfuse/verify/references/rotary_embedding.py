"""com.microsoft.RotaryEmbedding: pairs of channels turned by an angle that grows with the position.

| input | shape |
|---|---|
| input | (b, s, n·h) or (b, n, s, h) |
| position_ids | (1), the position of the first token of every entry, or (b, s) |
| cos_cache, sin_cache | (positions, half of the channels that are turned) |

The two of a pair are half of the turned channels apart, or neighbours if they are `interleaved`. `scale` changes nothing, as in
ONNX Runtime's CPU kernel.
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results, in_float32, merge_heads, places, split_heads


@in_float32
def rotary_embedding(
    input: Array,  # noqa: A002 - its name in the schema
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: int = 0,
    scale: float = 1.0,
    is_packed_batching: int = 0,
) -> Results:
    """The input, its first `rotary_embedding_dim` channels turned; 0 is all of them.

    Raises:
        ValueError: What is given does not fit together.
    """
    del scale, is_packed_batching
    if rotary_embedding_dim and not num_heads:
        raise ValueError("rotary_embedding_dim needs num_heads")
    turned = 2 * cos_cache.shape[1]
    array = split_heads(input, num_heads or input.shape[-1] // turned) if input.ndim == 3 else input
    if turned != (rotary_embedding_dim or array.shape[-1]):
        raise ValueError(f"the caches are for {turned} channels, of {array.shape[-1]} {rotary_embedding_dim or 'all'} are turned")
    batch, _, length, _ = array.shape
    if position_ids.ndim < 2:
        position_ids = np.broadcast_to(np.ravel(position_ids) + places(length), (batch, length))
    result = rotated(array, position_ids, cos_cache, sin_cache, interleaved=bool(interleaved))
    return (merge_heads(result) if input.ndim == 3 else result,)


def rotated(array: Array, positions: Array, cos_cache: Array, sin_cache: Array, *, interleaved: bool) -> Array:
    """(b, n, s, h) turned, at positions (b, s); as many channels as the caches have angles for.

    Raises:
        ValueError: A position is not in the caches.
    """
    if positions.size and not 0 <= positions.min() <= positions.max() < len(cos_cache):
        raise ValueError(f"positions {positions.min()} to {positions.max()}, the caches have {len(cos_cache)}")
    cos, sin = cos_cache[positions][:, None], sin_cache[positions][:, None]
    half = cos_cache.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    result = np.copy(array)
    result[..., first] = array[..., first] * cos - array[..., second] * sin
    result[..., second] = array[..., first] * sin + array[..., second] * cos
    return result


class RotaryEmbedding(Operator):
    """The operator RotaryEmbedding for onnx's evaluator."""

    compute = staticmethod(rotary_embedding)
