"""GroupQueryAttention's reference beyond what the kernel on the CPU tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_attnfuse.verify.references.group_query_attention import group_query_attention
from tests.support.kernel_cases import by_reference, cases_of

OPERATOR = "com.microsoft.GroupQueryAttention"


def test_rows_behind_the_length_of_their_entry_are_zero() -> None:
    case = next(case for case in cases_of(OPERATOR) if case.name == "ragged prompt, cap, softcap 1.5, scale 0.5")
    output = by_reference(case)[0]
    assert [int((row != 0).all(-1).sum()) for row in output] == [7, 3, 5]
    assert [int((row == 0).all(-1).sum()) for row in output] == [0, 4, 2]


def _run(last: list[int], longest: int, rows: int = 4, **given: Any) -> None:
    operands = [np.ones((len(last), rows, width), np.float32) for width in (64, 32, 32)]
    lengths = [np.asarray(last, np.int32), np.asarray(longest, np.int32)]
    inputs = [*operands, None, None, *lengths, *given.pop("more", [])]
    group_query_attention(*inputs, num_heads=4, kv_num_heads=2, **given)


@pytest.mark.parametrize(("last", "longest"), [([4], 4), ([3, -1], 4), ([1], 6), ([8], 6)])
def test_lengths_that_do_not_fit_are_refused(last: list[int], longest: int) -> None:
    with pytest.raises(ValueError, match="lengths"):
        _run(last, longest)


@pytest.mark.parametrize("given", [{"local_window_size": 0}, {"local_window_size": 2, "causal": 0}])
def test_a_window_without_a_meaning_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="local_window_size"):
        _run([3], 4, **given)


def test_what_is_not_known_is_refused() -> None:
    _run([3], 4, k_quant_type="NONE", qk_output=0, qk_norm_epsilon=1e-6)
    with pytest.raises(NotImplementedError, match="qk_output"):
        _run([3], 4, qk_output=1)
    with pytest.raises(ValueError, match="0 scales"):
        _run([3], 4, k_quant_type="PER_TENSOR", kv_cache_bit_width=8)
    with pytest.raises(ValueError, match="16 bits"):
        _run([3], 4, k_quant_type="PER_TENSOR", kv_cache_bit_width=16, more=[*[None] * 5, np.ones(1, np.float32)])
    with pytest.raises(NotImplementedError, match="input 14"):
        _run([3], 4, more=[*[None] * 7, np.ones(16, np.float32)])


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads"):
        group_query_attention(
            *[np.ones((1, 4, width), np.float32) for width in (64, 48, 48)],
            None,
            None,
            np.asarray([3], np.int32),
            np.asarray(4, np.int32),
            num_heads=4,
            kv_num_heads=3,
        )
