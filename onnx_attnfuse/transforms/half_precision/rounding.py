"""Numbers of float32 in a half type: those that overflow it become its largest, and no factor becomes 0."""

from __future__ import annotations

from typing import cast

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.constants import MAX_READ_ELEMENTS, Array, read_tensor
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.tensors import Computed

MAX_SCALAR_LIKE_ELEMENTS = 16
"""Constants of at most this many elements are parameters, such as the epsilon of a norm, whose 0 would be divided by."""


def rounded(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    """A tensor in another type; of weights nothing is read before they are written."""
    if tensor.size <= MAX_SCALAR_LIKE_ELEMENTS:
        return ir.tensor(_round(tensor, dtype), dtype=dtype, name=name)
    shape = ir.Shape(tensor.shape.numpy())
    return Computed(lambda: _round(tensor, dtype), (tensor,), dtype, shape, name)


def is_beyond(tensor: ir.TensorProtocol, dtype: ir.DataType) -> bool:
    """Whether a small constant holds a finite number that the type cannot say."""
    if tensor.size > MAX_READ_ELEMENTS or tensor.dtype != ir.DataType.FLOAT:
        return False
    array = read_tensor(tensor)
    return array is not None and bool((np.isfinite(array) & (np.abs(array) > largest(dtype))).any())


def _round(tensor: ir.TensorProtocol, dtype: ir.DataType) -> Array:
    array = read_tensor(tensor)
    if array is None:
        raise ModelError(f"the data of the weight {tensor.name!r} is gone; put the file back and try again")
    most = largest(dtype)
    found = np.where(np.isfinite(array), np.clip(array, -most, most), array).astype(dtype.numpy())
    if array.size > MAX_SCALAR_LIKE_ELEMENTS:
        return found
    least = cast("float", ml_dtypes.finfo(dtype.numpy()).smallest_subnormal)
    return np.where((found == 0) & (array != 0), np.copysign(least, array), found).astype(dtype.numpy())
