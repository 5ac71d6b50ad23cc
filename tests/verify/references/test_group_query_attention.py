"""GroupQueryAttention's reference beyond what the kernel on the CPU tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onnx_attnfuse.verify.references import operator
from tests.support.kernel_cases import by_reference, cases_of

OPERATOR = "com.microsoft.GroupQueryAttention"
group_query_attention = operator("GroupQueryAttention").called


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
    with pytest.raises(ValueError, match="qk_output"):
        _run([3], 4, qk_output=1)
    with pytest.raises(ValueError, match="0 scales"):
        _run([3], 4, k_quant_type="PER_TENSOR", kv_cache_bit_width=8)
    with pytest.raises(ValueError, match="16 bits"):
        _run([3], 4, k_quant_type="PER_TENSOR", kv_cache_bit_width=16, more=[*[None] * 5, np.ones(1, np.float32)])
    with pytest.raises(ValueError, match="or for neither"):
        _run([3], 4, more=[*[None] * 7, np.ones(16, np.float32)])


@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_normalized_as_torch_does_it_and_then_turned(packed: bool) -> None:
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal((2, 4, width)).astype(np.float32) for width in (64, 32, 32)]
    factors = [rng.standard_normal(16).astype(np.float32) for _ in range(2)]
    angles = np.arange(8)[:, None] / 10 ** (np.arange(8) / 8)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    lengths = [np.asarray([3, 2], np.int32), np.asarray(4, np.int32)]
    settings: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "qk_norm_epsilon": 0.01}
    normal = [
        torch.nn.functional.rms_norm(torch.from_numpy(item).unflatten(-1, (-1, 16)), (16,), torch.from_numpy(weight), 0.01)
        for item, weight in zip(operands[:2], factors, strict=True)
    ]
    in_front = [*(item.flatten(-2).numpy() for item in normal), operands[2]]
    given = [np.concatenate(operands, -1), None, None] if packed else operands
    wanted = group_query_attention(*in_front, None, None, *lengths, *tables, **settings)
    found = group_query_attention(*given, None, None, *lengths, *tables, *[None] * 5, *factors, **settings)
    for left, right in zip(wanted, found, strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize(
    ("counts", "past", "said"),
    [([5], True, "lengths"), ([-1], True, "lengths"), ([4], False, "beside earlier keys"), ([2], True, None)],
)
def test_rows_are_counted_where_they_fit_and_there_is_a_past(counts: list[int], said: str | None, *, past: bool) -> None:
    held = [np.ones((1, 2, 8, 16), np.float32)] * 2 if past else [None, None]
    operands = [np.ones((1, 4, width), np.float32) for width in (64, 32, 32)]
    inputs = [*operands, *held, np.asarray([5], np.int32), np.asarray(6, np.int32), *[None] * 9, np.asarray(counts, np.int32)]
    if said is None:
        output = group_query_attention(*inputs, num_heads=4, kv_num_heads=2)[0]
        assert [bool((row != 0).all()) for row in output[0]] == [True, True, False, False]
        return
    with pytest.raises(ValueError, match=said):
        group_query_attention(*inputs, num_heads=4, kv_num_heads=2)


def test_a_cache_of_no_more_than_a_window_needs_one() -> None:
    operands = [np.ones((1, 2, width), np.float32) for width in (64, 32, 32)]
    held, lengths = [np.ones((1, 2, 4, 16), np.float32)] * 2, [np.asarray([5], np.int32), np.asarray(6, np.int32)]
    counted = [*[None] * 9, np.asarray([2], np.int32)]
    settings: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2, "sliding_window_cache": 1}
    output, key, _ = group_query_attention(*operands, *held, *lengths, *counted, local_window_size=3, **settings)
    assert (output.shape, key.shape) == ((1, 2, 64), (1, 2, 4, 16))
    with pytest.raises(ValueError, match="needs one"):
        group_query_attention(*operands, *held, *lengths, *counted, **settings)
    biased = [*lengths, None, None, None, np.zeros((1, 1, 2, 6), np.float32), *[None] * 5, counted[-1]]
    with pytest.raises(ValueError, match="no bias"):
        group_query_attention(*operands, *held, *biased, local_window_size=3, **settings)
