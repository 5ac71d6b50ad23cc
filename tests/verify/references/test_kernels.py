"""The references of attention operators, and of a product, against their kernels on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.drawing import Case
from tests.support.kernel_cases import cases_of, check

OPERATORS = (
    "ai.onnx.Attention",
    "com.microsoft.Attention",
    "com.microsoft.CausalConvWithState",
    "com.microsoft.FusedMatMul",
    "com.microsoft.GroupQueryAttention",
    "com.microsoft.LinearAttention",
    "com.microsoft.MultiHeadAttention",
)
_NEWER = ("com.microsoft.CausalConvWithState", "com.microsoft.LinearAttention")
"""Operators that the oldest ONNX Runtime lacks, and that have kernels for float32 alone."""


def _cases(every: int = 1, without: Sequence[str] = ()) -> list[Any]:
    """Cases with their names; GroupQueryAttention has learned later than the oldest ONNX Runtime not to be causal."""
    found = [case for operator in OPERATORS if operator not in without for case in cases_of(operator, every=every)]
    newest = [pytest.mark.newest]
    return [pytest.param(case, id=f"{case.operator} {case.name}", marks=newest if _is_newer(case) else ()) for case in found]


def _is_newer(case: Case) -> bool:
    """Whether the oldest ONNX Runtime lacks what is asked for."""
    return "both ways" in case.name or "counted rows" in case.name or case.operator in _NEWER


@pytest.mark.sampled
@pytest.mark.parametrize("case", _cases())
def test_is_what_the_kernel_computes(case: Case) -> None:
    check(case)


@pytest.mark.sampled
@pytest.mark.parametrize("case", _cases(every=5, without=_NEWER))
def test_half_precision_is_rounded_once(case: Case) -> None:
    check(case, "float16")
