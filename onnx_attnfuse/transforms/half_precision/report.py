"""Report on a conversion to half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onnx_attnfuse.verify.model_result import Verification

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What became of the operators and weights of a model, and how far the result is from it."""

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

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        verification = None if self.verification is None else self.verification.to_dict()
        changed = {"islands": dict(self.islands), "seconds": round(self.seconds, 3), "notes": list(self.notes)}
        return {"schema": SCHEMA, **found, **changed, "verification": verification}
