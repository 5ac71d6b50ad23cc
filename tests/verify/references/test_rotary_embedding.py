"""The reference of com.microsoft's RotaryEmbedding against the kernel on the CPU; that of the standard is onnx's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_attnfuse.verify.references import operator
from tests.support.drawing import Case
from tests.support.kernel_cases import cases_of, check

OPERATORS = ("com.microsoft.RotaryEmbedding", "ai.onnx.RotaryEmbedding")
CASES = [case for operator in OPERATORS for case in cases_of(operator)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operator} {case.name}")
def test_is_what_the_kernel_computes(case: Case, dtype: str) -> None:
    check(case, dtype)


def _turned(width: int, positions: Any, **given: int) -> None:
    caches = [np.ones((6, width), np.float32)] * 2
    operator("RotaryEmbedding").called(np.ones((2, 4, 32), np.float32), np.asarray(positions), *caches, **given)


def test_positions_that_the_caches_lack_are_refused() -> None:
    _turned(8, [2])
    for positions in ([3], [-1]):
        with pytest.raises(ValueError, match="positions"):
            _turned(8, positions)


def test_caches_of_another_width_are_refused() -> None:
    for given in ({"num_heads": 2}, {"num_heads": 2, "rotary_embedding_dim": 12}):
        with pytest.raises(ValueError, match="channels"):
            _turned(4, [0], **given)
    with pytest.raises(ValueError, match="num_heads"):
        _turned(4, [0], rotary_embedding_dim=8)
