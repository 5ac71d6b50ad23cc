"""Choosing the operator for one attention; every refusal is kept."""

from __future__ import annotations

import dataclasses

from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import TARGETS, Target


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will compute an attention, or why nothing can."""

    target: Target | None
    refusals: tuple[Reason, ...]


def make_plan(spec: AttentionSpec) -> Plan:
    """Picks the first target that takes `spec`."""
    refusals: list[Reason] = []
    for target in TARGETS:
        refusal = target.refuse(spec)
        if refusal is None:
            return Plan(target, tuple(refusals))
        refusals.append(refusal)
    return Plan(None, tuple(refusals))
