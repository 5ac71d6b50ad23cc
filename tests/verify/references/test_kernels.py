"""The references of attention operators, and of a product, against their kernels on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from onnx_attnfuse.bench.conformance.drawing import Case
from tests.support.kernel_cases import cases_of, check

OPERATORS = (
    "ai.onnx.Attention",
    "com.microsoft.Attention",
    "com.microsoft.FusedMatMul",
    "com.microsoft.GroupQueryAttention",
    "com.microsoft.MultiHeadAttention",
)


def _cases(every: int = 1) -> list[Any]:
    """Cases with their names; GroupQueryAttention has learned later than the oldest ONNX Runtime not to be causal."""
    found = [case for operator in OPERATORS for case in cases_of(operator, every=every)]
    newest = [pytest.mark.newest]
    return [
        pytest.param(case, id=f"{case.operator} {case.name}", marks=newest if "both ways" in case.name else ()) for case in found
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("case", _cases())
def test_is_what_the_kernel_computes(case: Case) -> None:
    check(case)


@pytest.mark.sampled
@pytest.mark.parametrize("case", _cases(every=5))
def test_half_precision_is_rounded_once(case: Case) -> None:
    check(case, "float16")
