"""Gated delta rules of transformers, by step, unrolled and in chunks; run by `make test-models`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from tests.mixers.test_candidates import exported, kinds, operands

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch, of itself


def _gated_delta(rule: str, *inputs: torch.Tensor, **settings: int) -> Any:
    *given, state = inputs
    return getattr(modeling, rule)(*given, initial_state=state.clone(), output_final_state=True, **settings)


@pytest.mark.parametrize(("length", "kind"), [(1, "recurrence"), (3, "unrolled recurrence")])
def test_tokens_are_one_mixer(length: int, kind: str) -> None:
    step = functools.partial(_gated_delta, "torch_recurrent_gated_delta_rule")
    assert kinds(exported(step, *operands(length))) == [kind]


def test_chunks_are_one_mixer() -> None:
    rule = functools.partial(_gated_delta, "torch_chunk_gated_delta_rule", chunk_size=4)
    assert kinds(exported(rule, *operands(7))) == ["chunked recurrence"]
