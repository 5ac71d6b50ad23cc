"""The types in which GroupQueryAttention keeps a quantised cache: numbers of a few bits, each times a scale.

Measured on the CPU with ONNX Runtime 1.31.1, against NumPy: a number is divided by its scale, rounded to the nearest (halves to
even) and cut off at the ends of the range; int4 adds 8 and stores two channels in a byte, the first in the lower half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """One type of a quantised cache."""

    name: str
    """Its name for `--kv-cache`."""
    dtype: ir.DataType
    """The element type of the cache's tensors."""
    bits: int
    """The attribute `kv_cache_bit_width`."""
    lowest: float
    largest: float
    """The range of stored numbers, before they are scaled."""
    room: float
    """How many times larger than any that was measured a number may be before it is cut off; with few bits there is no room."""

    def stored_size(self, head_size: int) -> int:
        """The last dimension of the cache."""
        return -(-head_size * self.bits // 8)


FORMATS: Mapping[str, CacheFormat] = {
    item.name: item
    for item in (
        CacheFormat("int8", ir.DataType.INT8, 8, -128, 127, 1.25),
        CacheFormat("int4", ir.DataType.UINT8, 4, -8, 7, 1.0),
        CacheFormat("float8", ir.DataType.FLOAT8E4M3FN, 8, -448, 448, 2.0),
    )
}
"""The formats by name."""


def format_of(dtype: ir.DataType | None) -> CacheFormat | None:
    """The format of a cache of an element type; None: it is not quantised."""
    return next((item for item in FORMATS.values() if item.dtype == dtype), None)
