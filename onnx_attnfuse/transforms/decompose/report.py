"""Report on a model whose fused operators were decomposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from onnx_attnfuse.containment import Failure
from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.verify.verdict import Verified


@dataclasses.dataclass(frozen=True)
class UnfusedSite:
    """One fused operator."""

    name: str
    """Name of the node in the source model."""
    graph: str
    """Path of its graph, as in `SiteReport`."""
    op: str
    domain: str
    status: Literal["unfused", "kept"]
    verified: Verified | None = None
    """The error of the decomposition; None if it was not verified."""
    reason: Reason | None = None
    """Why it stays."""


@dataclasses.dataclass(frozen=True)
class UnfuseReport(JsonReport):
    """Every fused operator of a model, and what became of it."""

    _JSON_KEYS = ("unfused", "kept", "differing", "seconds", "ops_before", "ops_after", "failures", "sites")

    sites: tuple[UnfusedSite, ...]
    seconds: float
    ops_before: Mapping[str, int]
    """Node count by `domain::op_type`, subgraphs and functions included."""
    ops_after: Mapping[str, int]
    differing: int = 0
    """Operators that verification found different from their decomposition, and that stay."""
    failures: tuple[Failure, ...] = ()
    """Exceptions that cost an operator."""

    @property
    def unfused(self) -> int:
        """Number of operators that were decomposed."""
        return sum(site.status == "unfused" for site in self.sites)

    @property
    def kept(self) -> int:
        """Number of operators that stay as they were."""
        return len(self.sites) - self.unfused
