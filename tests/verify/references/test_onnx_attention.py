"""The reference of the standard's Attention against onnx's own, which it is not throughout."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx_attnfuse.verify.references import operator
from onnx_attnfuse.verify.verdict import TIGHT, compare
from tests.support.drawing import Case
from tests.support.kernel_cases import by_reference, cases_of, feeds_of, model_of

OPERATOR = "ai.onnx.Attention"
onnx_attention = operator("Attention", "").called


@pytest.mark.sampled
@pytest.mark.newest  # before onnx 1.23 its reference is wrong about truth values, rows without a key and lengths
@pytest.mark.parametrize("case", cases_of(OPERATOR), ids=lambda case: case.name)
def test_is_what_onnx_says_but_for_rows_of_the_lowest(case: Case) -> None:
    inputs = case.inputs()
    with np.errstate(all="ignore"):
        theirs = onnx.reference.ReferenceEvaluator(model_of(case, inputs)).run(None, feeds_of(inputs))
    equal = [compare(one, other, TIGHT).equal for one, other in zip(theirs, by_reference(case), strict=True)]
    assert all(equal) == ("rows of the lowest" not in case.name)


def _operands(columns: int = 6) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal((2, 2, length, 8)).astype(np.float32) for length in (5, columns, columns)]


def test_the_lowest_is_a_number_in_masks_that_the_kernel_refuses() -> None:
    operands = _operands()
    lowest = np.full((2, 1, 1, 6), np.finfo(np.float32).min, np.float32)
    values = operands[2].mean(axis=2, keepdims=True)
    np.testing.assert_allclose(onnx_attention(*operands, lowest)[0], np.broadcast_to(values, (2, 2, 5, 8)), atol=1e-6)
    assert not onnx_attention(*operands, np.broadcast_to(lowest, (2, 1, 5, 6)))[0].any()


def test_keys_behind_a_short_mask_are_not_seen() -> None:
    query, key, value = _operands()
    mask = np.zeros((5, 4), np.float32)
    short = onnx_attention(query, key, value, mask)[0]
    np.testing.assert_allclose(short, onnx_attention(query, key[:, :, :4], value[:, :, :4])[0], atol=1e-6)
    np.testing.assert_array_equal(short, onnx_attention(query, key, value, mask == 0)[0])


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_are_given_out_as_asked_for(mode: int) -> None:
    query, key, value = _operands()
    mask = np.tril(np.ones((5, 6))) > 0
    given = onnx_attention(query, key, value, mask, softcap=1.5, qk_matmul_output_mode=mode)[3]
    scores = np.einsum("bnsh,bnth->bnst", query, key) / np.sqrt(8)
    cut = 1.5 * np.tanh(scores / 1.5)
    weights = np.where(mask, np.exp(cut), 0) / np.where(mask, np.exp(cut), 0).sum(-1, keepdims=True)
    np.testing.assert_allclose(given, [scores, cut, np.where(mask, cut, np.finfo(np.float32).min), weights][mode], atol=1e-6)


def test_what_the_kernel_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="scale"):
        onnx_attention(*_operands(), scale=0.0)
    with pytest.raises(ValueError, match="newest_size"):
        onnx_attention(*_operands(), newest_size=2)
