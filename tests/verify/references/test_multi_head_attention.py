"""MultiHeadAttention's reference beyond what the kernel on the CPU tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_attnfuse.verify.references import operator
from tests.support.kernel_cases import by_reference, cases_of

OPERATOR = "com.microsoft.MultiHeadAttention"
multi_head_attention = operator("MultiHeadAttention").called


@pytest.mark.parametrize("packed", ["all packed", "keys and values packed"])
def test_packed_operands_are_those_that_stand_alone(packed: str) -> None:
    case = next(case for case in cases_of(OPERATOR, "cuda") if case.name == packed)
    arrays = [array for array in case.inputs() if array is not None]
    *alone, last = arrays
    alone += [last[:, :, :, part].reshape(2, 6, 32) for part in range(last.shape[3])]
    np.testing.assert_array_equal(by_reference(case)[0], multi_head_attention(*alone, num_heads=2)[0])


def _operands(rows: int, columns: int) -> list[Any]:
    return [np.ones((2, length, 32), np.float32) for length in (rows, columns, columns)]


@pytest.mark.parametrize("rows", [2, 7])
def test_a_triangle_that_kernels_disagree_on_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="disagree"):
        multi_head_attention(*_operands(rows, 4), num_heads=2, unidirectional=1)


def test_the_triangle_of_a_single_row_is_none() -> None:
    one, other = (multi_head_attention(*_operands(1, 4), num_heads=2, unidirectional=triangle) for triangle in (0, 1))
    np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize("shape", [(4,), (3,), (2, 5), (1, 4), (2, 3, 4), (2, 1, 4, 4)])
def test_a_mask_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask"):
        multi_head_attention(*_operands(4, 4), None, np.ones(shape, np.int32), num_heads=2)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="past_sequence_length"):
        multi_head_attention(*_operands(4, 4), *[None] * 5, np.ones(1, np.int32), num_heads=2)
    with pytest.raises(ValueError, match="missing"):
        multi_head_attention(*_operands(4, 4)[:2], num_heads=2)
