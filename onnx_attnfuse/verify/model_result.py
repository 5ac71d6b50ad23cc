"""Result of comparing two models on the same inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.verify.tolerance import Comparison


@dataclasses.dataclass(frozen=True)
class OutputFinding:
    """One output over all cases."""

    name: str
    differing: int
    """Cases in which it differs."""
    max_abs_error: float | None
    """Over all elements that are finite in both models; None where shapes or types differ, or elements that are no floats."""
    relative_error: float | None
    """`max_abs_error` as a part of the magnitude of the first model's output."""
    nan_only_in_first: int
    nan_only_in_second: int
    """Elements, over all cases, that are NaN in one model only."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first inner value in which the models differ, of those that both have by name."""

    value: str
    node_in_first: str
    """The node that computes it, as `name (operator)`."""
    node_in_second: str
    site: str | None
    """The attention, by the name of its Softmax or operator, between the value and the last equal values; None: there is none."""
    detail: str
    """Where the value differs, and in how many elements."""


@dataclasses.dataclass(frozen=True)
class Verification(JsonReport):
    """Whether two models are the same, and how that was found."""

    equal: bool
    cases: int
    """Inputs that both were run on."""
    refused: int
    """Inputs that the first model does not run on; these are skipped."""
    outputs: tuple[OutputFinding, ...]
    detail: str
    """One line: that they are equal, or the first case in which they differ, and where."""
    kinds: tuple[tuple[str, str], ...]
    """Every input and its assumed kind."""
    divergence: Divergence | None = None
    """Where the difference begins; None if nothing differs, or no inner value is in both models."""
    notes: tuple[str, ...] = ()
    """Lines on other measurements: the error of a quantised cache."""

    def to_dict(self) -> dict[str, Any]:
        """The verification as plain JSON types."""
        return {**super().to_dict(), "kinds": dict(self.kinds)}


def finding(name: str, results: Sequence[Comparison]) -> OutputFinding:
    """The comparisons of one output in all cases, together."""
    errors, parts = ([getattr(result, field) for result in results] for field in ("max_abs_error", "relative"))
    return OutputFinding(
        name,
        sum(not result.equal for result in results),
        max(errors) if np.isfinite(errors).all() else None,
        max(parts) if np.isfinite(parts).all() else None,
        sum(result.nan_lost for result in results),
        sum(result.nan_found for result in results),
    )
