"""Element types by the numbers they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import ml_dtypes
import numpy as np
import onnx_ir as ir

HALVES = frozenset([ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
"""Float types of 16 bits."""
FLOATS_TO_32 = HALVES | {ir.DataType.FLOAT}
"""Float types that attention is computed in: no fused operator of ONNX Runtime takes float64."""
FLOATS = FLOATS_TO_32 | {ir.DataType.DOUBLE}
"""Float types that graphs compute in. Those of 8 and fewer bits are left out: weights are stored in them."""

WHOLE_TO: Mapping[ir.DataType, int] = {
    ir.DataType.FLOAT16: 1 << 11,
    ir.DataType.BFLOAT16: 1 << 8,
    ir.DataType.FLOAT: 1 << 24,
    ir.DataType.DOUBLE: 1 << 53,
}
"""Up to where a float type holds every integer."""


_NAMES = {None: "an unknown type", ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


def type_name(dtype: ir.DataType | None) -> str:
    """An element type in words."""
    return _NAMES[dtype] if dtype is None or dtype in _NAMES else dtype.name.lower()


def widened(dtype: ir.DataType) -> ir.DataType:
    """The element type with float32 in the place of float types of 16 bits."""
    return ir.DataType.FLOAT if dtype in HALVES else dtype


def integers(dtype: ir.DataType) -> tuple[int, int]:
    """The lowest and the largest number of an integer type."""
    bits = int(dtype.bitwidth)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.is_signed() else (0, (1 << bits) - 1)


def largest(dtype: ir.DataType) -> float:
    """The largest finite number of a float type."""
    return float(cast("float", ml_dtypes.finfo(dtype.numpy()).max))


def held_as_lowest(dtype: ir.DataType) -> float:
    """The number from which down a float type holds its lowest number; that of a half is a number of float32."""
    eps, wide = float(cast("float", ml_dtypes.finfo(dtype.numpy()).eps)), widened(dtype).numpy().type
    step = largest(dtype) * eps / (2 - eps)
    return float(np.nextafter(wide((step / 2 if dtype in HALVES else step) - largest(dtype)), wide(-math.inf)))


def within(number: float, dtype: ir.DataType) -> float:
    """A number, or the infinity that it is in a float type too small for it.

    Its digits stay: the device's type decides how it is rounded.
    """
    with np.errstate(over="ignore"):
        held = float(np.asarray(number).astype(dtype.numpy()))
    return held if math.isinf(held) else number


def narrows(before: ir.DataType | None, after: ir.DataType | None) -> bool:
    """Whether a cast from one float type to another may round a number, or make it infinite."""
    if before is None or after is None or not FLOATS.issuperset((before, after)):
        return False
    return WHOLE_TO[after] < WHOLE_TO[before] or largest(after) < largest(before)
