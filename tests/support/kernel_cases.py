"""The cases of an operator, and what holds a kernel against its reference."""

from __future__ import annotations

import pytest

pytest.importorskip("onnxruntime")

from onnx_attnfuse.bench.conformance.cases import Array, feeds_of, model_of
from onnx_attnfuse.verify.runtime import Reference
from tests.support.drawing import Case
from tests.support.held_to_references import DTYPES, held
from tests.support.reference_cases import cases

__all__ = ["DTYPES", "by_reference", "cases_of", "check", "feeds_of", "model_of"]


def cases_of(operator: str, provider: str = "cpu", every: int = 1) -> list[Case]:
    """The cases of `domain.Operator` that a provider runs, or only some of them."""
    found = [case for case in cases() if case.operator == operator and provider in case.providers]
    assert found
    return found[::every]


def check(case: Case, dtype: str = "float32") -> None:
    """Holds the kernel on the CPU against the reference."""
    for place, comparison in enumerate(held(case, dtype, "cpu")):
        assert comparison.equal, f"output {place}: {comparison.detail}"


def by_reference(case: Case, dtype: str = "float32") -> list[Array]:
    """What the reference gives."""
    inputs = case.inputs(DTYPES[dtype])
    return Reference(model_of(case, inputs)).run(None, feeds_of(inputs))
