"""RemovePadding and RestorePadding, for which there is no kernel on the CPU, against tokens picked one by one."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_attnfuse.verify.references import operator
from tests.support.drawing import Case
from tests.support.kernel_cases import by_reference, cases_of

remove_padding, restore_padding = operator("RemovePadding").called, operator("RestorePadding").called


@pytest.mark.parametrize("case", cases_of("com.microsoft.RemovePadding", "cuda"), ids=lambda case: case.name)
def test_tokens_are_picked_and_come_back(case: Case) -> None:
    tensor, counts = case.inputs()
    assert tensor is not None
    assert counts is not None
    batch, length, _ = tensor.shape
    tokens, offsets, starts, longest = by_reference(case)
    picked = [tensor[entry, place] for entry in range(batch) for place in range(counts[entry])]
    assert len(tokens) == len(picked)
    assert all(np.array_equal(one, other) for one, other in zip(tokens, picked, strict=True))
    flat = offsets.reshape(-1)
    assert sorted(flat) == list(range(batch * length))
    assert [(place // length, place % length) for place in flat[: len(picked)]] == [
        (entry, place) for entry in range(batch) for place in range(counts[entry])
    ]
    assert all(place % length >= counts[place // length] for place in flat[len(picked) :])
    assert [starts[entry + 1] - starts[entry] for entry in range(batch)] == list(counts)
    assert (starts[0], list(longest)) == (0, [max(counts)])
    assert {offsets.dtype.name, starts.dtype.name, longest.dtype.name} == {"int32"}
    restored = restore_padding(tokens, offsets)[0]
    for entry, count in enumerate(counts):
        np.testing.assert_array_equal(restored[entry, :count], tensor[entry, :count])
        assert not restored[entry, count:].any()


@pytest.mark.parametrize("case", cases_of("com.microsoft.RestorePadding", "cuda"), ids=lambda case: case.name)
def test_padding_is_zero(case: Case) -> None:
    tokens, offsets = case.inputs()
    assert tokens is not None
    assert offsets is not None
    expected = np.zeros((offsets.size, tokens.shape[1]), np.float32)
    for place, token in zip(offsets.reshape(-1), tokens, strict=False):
        expected[place] = token
    np.testing.assert_array_equal(by_reference(case)[0].reshape(expected.shape), expected)


@pytest.mark.parametrize("counts", [[5, 1], [-1, 2], [1, 2, 3]])
def test_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"tokens|reshape"):
        remove_padding(np.ones((2, 4, 8), np.float32), np.asarray(counts, np.int32))


def test_half_precision_stays_what_it_is() -> None:
    tokens = remove_padding(np.ones((1, 2, 4), np.float16), np.asarray([1]))[0]
    assert tokens.dtype == np.float16
    assert restore_padding(tokens, np.asarray([[0, 1]]))[0].dtype == np.float16
