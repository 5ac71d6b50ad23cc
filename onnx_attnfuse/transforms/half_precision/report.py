"""Report on a conversion to half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.verify.model_result import Verification


@dataclasses.dataclass(frozen=True)
class ConversionReport(JsonReport):
    """Report of a conversion: counts of operators, casts and weights, and how far the result is from the original."""

    dtype: str
    nodes: int
    """Operators that compute in the half type."""
    islands: Mapping[str, int]
    """Operators that stay float32, by operator."""
    casts: int
    """Casts that were added."""
    bytes_before: int
    """Size of all weights."""
    bytes_after: int
    seconds: float
    verification: Verification | None = None
    """The result against the model; None if they were not compared."""
    notes: tuple[str, ...] = ()
