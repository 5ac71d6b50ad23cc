"""Element types by the numbers they hold, beside those that the types themselves give."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.dtypes import FLOATS, largest, last_step


@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
def test_the_last_step_of_a_float_type_leads_to_its_largest_number(dtype: ir.DataType) -> None:
    top = np.asarray([largest(dtype)], dtype.numpy())
    bits = top.view(f"u{top.itemsize}")
    before = (bits - bits.dtype.type(1)).view(top.dtype)
    assert last_step(dtype) == float(top[0]) - float(before[0]) > 0
