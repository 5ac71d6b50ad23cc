"""Rows without a key in one call for all rows, as GPUs and compiled graphs have them: results and gradients of a softmax."""

from __future__ import annotations

import math

import pytest
import torch

from onnx_attnfuse.graph.thresholds import ROUNDS_ALL_DOUBLE
from onnx_attnfuse.training.pytorch import rows

Tensor = torch.Tensor
LOWEST = torch.finfo(torch.float64).min
SCALE = 0.3


def _operands(heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 5, 8), (2, heads, 6, 8), (2, heads, 6, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _bias(number: float, row: float) -> Tensor:
    """Numbers on some keys, and a row that has them on all, some a little higher."""
    bias = torch.zeros(2, 1, 5, 6, dtype=torch.float64)
    bias[0, :, :, 4:] = number
    bias[1, :, 2] = number
    bias[1, :, 2, :2] += row
    return bias


def _outcome(call, operands, *more: Tensor) -> list[Tensor]:
    result = call(*operands, *more)
    wanted = [item for item in (*operands, *more) if item.requires_grad]
    weight = torch.arange(result.numel(), dtype=torch.float64).reshape(result.shape).sin()
    return [result.detach(), *torch.autograd.grad((result * weight).sum(), wanted)]


def _softmax(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("number", "row"), [(LOWEST, 0), (LOWEST, 1e300), (-1e30, 5.0), (-math.inf, 0), (-2e3, 3.0), (-5.0, 0)])
def test_numbers_that_are_added_leave_what_a_softmax_leaves(number, row, trained) -> None:
    bias = _bias(number, row).requires_grad_(trained)
    expected = _outcome(_softmax, _operands(), bias)
    for call in (rows.levelled_apart, rows.attend_levelled):
        found = _outcome(lambda *given, call=call: call(*given, SCALE, 1.0, 0.0, ()), _operands(), bias)
        if trained and number == -math.inf:  # NaN is what eager PyTorch gives to the bias, too; a kernel gives it a number
            found, expected = found[:-1], expected[: len(found) - 1]
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9, equal_nan=True)


def test_a_factor_after_the_sum_does_not_undo_its_rounding() -> None:
    bias = _bias(ROUNDS_ALL_DOUBLE, 0)
    expected = _outcome(lambda *given: _softmax(given[0], given[1], given[2], bias), _operands())
    halved = _outcome(lambda q, k, v: ((q @ k.mT * SCALE + bias) / 2).softmax(-1) @ v, _operands())
    found = _outcome(lambda *given: rows.levelled_apart(*given, bias / 2, SCALE / 2, 0.5, 0.0, ()), _operands())
    torch.testing.assert_close(found, halved, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found[0][1, :, 2], expected[0][1, :, 2], atol=1e-9, rtol=1e-9)
    as_unrounded = _outcome(lambda *given: rows.levelled_apart(*given, bias / 2, SCALE / 2, 1.0, 0.0, ()), _operands())
    assert not torch.allclose(as_unrounded[0][1, :, 2], halved[0][1, :, 2], atol=1e-3)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("fill", [LOWEST, -1e30])
@pytest.mark.parametrize("row", [0, 1])
def test_one_number_that_swallows_scores_leaves_equal_weights(fill, row, heads) -> None:
    bias = _bias(fill, 0)[row : row + 1]  # the first entry has no row without a key
    kept = bias == 0
    empty = rows.without_key(kept)
    expected = _outcome(_softmax, _operands(heads), bias)
    opened = rows.opened(kept, empty)
    apart = _outcome(lambda *given: rows.added_apart(*given, opened, empty, SCALE, 0.0, ()), _operands(heads))
    chosen = _outcome(lambda *given: rows.attend_added(*given, opened, empty, SCALE, 0.0, (), fill), _operands(heads))
    for found in (apart, chosen):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_a_number_that_leaves_something_of_scores_has_no_equal_weights() -> None:
    bias = _bias(-1e4, 0)
    kept = bias == 0
    empty = rows.without_key(kept)
    expected = _outcome(_softmax, _operands(), bias)
    found = _outcome(lambda *given: rows.added_apart(*given, rows.opened(kept, empty), empty, SCALE, 0.0, ()), _operands())
    assert not torch.allclose(found[0], expected[0], atol=1e-3)
