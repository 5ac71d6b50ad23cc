"""The references of the attention operators against their kernels on the CPU."""

from __future__ import annotations

import pytest

from benchmarks.reference_inputs import Case
from tests.held import cases_of, check

OPERATORS = (
    "ai.onnx.Attention",
    "com.microsoft.Attention",
    "com.microsoft.GroupQueryAttention",
    "com.microsoft.MultiHeadAttention",
)


def _cases(every: int = 1) -> list[Case]:
    return [case for operator in OPERATORS for case in cases_of(operator, every=every)]


@pytest.mark.parametrize("case", _cases(), ids=lambda case: f"{case.operator} {case.name}")
def test_is_what_the_kernel_computes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", _cases(every=5), ids=lambda case: f"{case.operator} {case.name}")
def test_half_precision_is_rounded_once(case: Case) -> None:
    check(case, "float16")
