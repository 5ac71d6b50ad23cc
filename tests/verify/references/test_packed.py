"""Packed attention, for which there is no kernel on the CPU, against torch on the tokens of each entry, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from onnx_attnfuse.verify.references import operator
from tests.support.drawing import Case
from tests.support.kernel_cases import by_reference, cases_of

torch = pytest.importorskip("torch")

packed_attention, packed_multi_head_attention = operator("PackedAttention").called, operator("PackedMultiHeadAttention").called
CASES = [case for op in ("PackedMultiHeadAttention", "PackedAttention") for case in cases_of(f"com.microsoft.{op}", "cuda")]


def _entry_by_entry(operands: list[Any], starts: Any, bias: Any, scale: float | None) -> Any:
    """Operands are (tokens, n, h) each, the bias (b or 1, n, s, s)."""
    found = []
    for entry, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        query, key, value = (operand[start:end].transpose(0, 1) for operand in operands)
        mask = None if bias is None else bias[min(entry, len(bias) - 1), :, : end - start, : end - start]
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        found.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(found)


def _expected(case: Case) -> Any:
    arrays = [None if array is None else torch.from_numpy(array).double() for array in case.inputs()]
    arrays += [None] * (7 - len(arrays))
    if case.op == "PackedAttention":
        tokens, weights, biases, _, starts, bias = arrays[:6]
        sizes = case.attributes["qkv_hidden_sizes"]
        operands = [part.unflatten(1, (2, -1)) for part in (tokens @ weights + biases).split(sizes, dim=1)]
        return _entry_by_entry(operands, starts.long(), bias, case.attributes["scale"])
    query, key, value, biases, _, starts, bias = arrays
    operands = list(query.unbind(2)) if key is None else [part.unflatten(1, (2, -1)) for part in (query, key, value)]
    if biases is not None:
        parts = biases.split([part[0].numel() for part in operands])
        operands = [part + added.view(2, -1) for part, added in zip(operands, parts, strict=True)]
    return _entry_by_entry(operands, starts.long(), bias, None)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name}")
def test_is_attention_within_each_entry(case: Case) -> None:
    np.testing.assert_allclose(by_reference(case)[0], _expected(case).numpy(), atol=1e-5)


@pytest.mark.parametrize("starts", [[0, 3, 6], [1, 3, 5], [0, 5, 4], [0, 4, 3, 5], [0, 5]])
def test_places_that_are_none_for_as_many_tokens_are_refused(starts: list[int]) -> None:
    tokens = [np.ones((5, 16), np.float32)] * 3
    places = [np.zeros((2, 4), np.int32), np.asarray(starts, np.int32)]
    with pytest.raises(ValueError, match="entries that start"):
        packed_multi_head_attention(*tokens, None, *places, num_heads=2)
    with pytest.raises(ValueError, match="entries that start"):
        packed_attention(tokens[0], np.ones((16, 48)), np.ones(48), *places, num_heads=2)


def test_rows_behind_the_last_entry_are_of_none() -> None:
    tokens = [np.ones((5, 16), np.float32)] * 3
    places = [np.zeros((2, 4), np.int32), np.asarray([0, 1, 3], np.int32)]
    (found,) = packed_multi_head_attention(*tokens, None, *places, num_heads=2)
    assert np.isfinite(found[:3]).all()
    assert np.isnan(found[3:]).all()


def test_values_must_be_given() -> None:
    tokens = np.ones((5, 16), np.float32)
    with pytest.raises(ValueError, match="missing"):
        packed_multi_head_attention(tokens, tokens, None, None, np.zeros((1, 5)), np.asarray([0, 5]), num_heads=2)
