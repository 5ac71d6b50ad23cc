"""One file per operator that can compute an attention: why it cannot, and how it is built."""

from __future__ import annotations

from typing import Protocol

from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import attention, group_query_attention, multi_head_attention, onnx_attention
from onnx_attnfuse.targets.emitted import Emitted, Way, Workbench


class Target(Protocol):
    """An operator."""

    OP: str
    DOMAIN: str
    PROVIDERS: frozenset[str]
    """The execution providers on which it is considered where nobody asks for it."""

    ALONE: bool
    """It takes in what stands before the attention, so no other operator shares a site with it."""

    def refuse(self, spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Reason | None:
        """Why this operator cannot compute `spec`, or None if it can."""
        ...

    def ways(self, spec: AttentionSpec, meaning: Meaning) -> tuple[Way, ...]:
        """How the mask can be handed over, and for which batches each way is exact."""
        ...

    def emit(self, spec: AttentionSpec, meaning: Meaning, bench: Workbench, way: Way, *, flat: bool = False) -> Emitted:
        """Builds the operator beside the nodes it replaces."""
        ...


TARGETS: tuple[Target, ...] = (multi_head_attention, group_query_attention, onnx_attention, attention)
"""In the order in which they are taken where they are equally fast."""


def name_of(target: Target) -> str:
    """What a caller calls it: the operator, an `onnx.` before it if it is a standard one."""
    return qualified(target.OP, target.DOMAIN)


def qualified(op: str, domain: str) -> str:
    """The name of an operator among fused operators."""
    return op if domain not in {"", "ai.onnx"} else f"onnx.{op}"
