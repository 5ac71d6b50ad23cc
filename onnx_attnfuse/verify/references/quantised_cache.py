"""A quantised cache in NumPy: numbers divided by a scale, rounded and cut off, and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference.op_run import OpRun

from onnx_attnfuse.bodies.group_query_attention import PRIVATE
from onnx_attnfuse.kernels.cache_formats import FORMATS, CacheFormat

Array = npt.NDArray[Any]
_HALF_BYTE = 4
_ZERO = 8
"""The offset of int4, so that stored numbers are not negative."""


def quantised(array: Array, scale: Array, form: CacheFormat) -> Array:
    """Keys or values (b, m, t, h) as they are stored, (b, m, t, stored).

    Args:
        array: Keys or values.
        scale: One number, or one for each channel, (1, m, 1, h).
        form: The format.
    """
    with np.errstate(all="ignore"):
        scaled = np.clip(np.asarray(array, np.float32) / scale, form.lowest, form.largest)
    if form.dtype == ir.DataType.FLOAT8E4M3FN:
        return scaled.astype(form.dtype.numpy())
    whole = np.rint(scaled).astype(np.int8)
    return whole if form.bits != _HALF_BYTE else _packed(whole)


def restored(stored: Array, scale: Array, form: CacheFormat, head_size: int) -> Array:
    """A cache dequantised, (b, m, t, h) float32."""
    numbers = stored if form.bits != _HALF_BYTE else _unpacked(stored)[..., :head_size]
    return numbers.astype(np.float32) * scale


def step(array: Array, scale: Array, form: CacheFormat) -> Array:
    """How far a number is from what it is stored as, at most, where it is within the range."""
    if form.dtype != ir.DataType.FLOAT8E4M3FN:
        return np.broadcast_to(scale / 2, array.shape)
    return np.maximum(np.abs(array) * 2.0**-4, scale * 2.0**-10)


def _packed(whole: Array) -> Array:
    """Two numbers in each byte, the first in its lower half."""
    raised = (whole + _ZERO).astype(np.uint8)
    if raised.shape[-1] % 2:
        raised = np.concatenate([raised, np.full_like(raised[..., :1], _ZERO)], axis=-1)
    return raised[..., ::2] | (raised[..., 1::2] << _HALF_BYTE)


def _unpacked(stored: Array) -> Array:
    pair = np.stack([stored & 0xF, stored >> _HALF_BYTE], axis=-1)
    return pair.reshape(*stored.shape[:-1], 2 * stored.shape[-1]).astype(np.int8) - _ZERO


class QuantiseCache(OpRun):
    """Keys or values as a cache of so many bits holds them, for the body of GroupQueryAttention."""

    op_domain = PRIVATE

    def _run(self, array: Array, scale: Array, *, bits: int, to: int) -> tuple[Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (quantised(array, scale, _form(bits, to)),)


class DequantiseCache(OpRun):
    """Keys or values as they are read from such a cache."""

    op_domain = PRIVATE

    def _run(self, stored: Array, scale: Array, *, bits: int, to: int, size: int) -> tuple[Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (restored(stored, scale, _form(bits, to), size),)


CACHE_OPERATORS: list[type[OpRun]] = [QuantiseCache, DequantiseCache]


def _form(bits: int, to: int) -> CacheFormat:
    """The format of a cache.

    Raises:
        ValueError: There is none like it.
    """
    for form in FORMATS.values():
        if form.bits == bits and int(form.dtype) == to:
            return form
    raise ValueError(f"there is no quantised cache of {bits} bits in {ir.DataType(to)}")
