"""Element types by the numbers they hold, beside those that the types themselves give."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.dtypes import FLOATS, held_as_lowest, largest, widened


@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
def test_a_float_type_holds_as_its_lowest_what_is_rounded_to_it(dtype: ir.DataType) -> None:
    lowest, wide = -largest(dtype), widened(dtype).numpy()
    number = np.asarray(held_as_lowest(dtype), wide)
    assert float(number.astype(dtype.numpy())) == lowest
    assert float(np.nextafter(number, wide.type(0)).astype(dtype.numpy())) > lowest
