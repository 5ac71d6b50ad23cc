"""One file per operator that can compute an attention: why it cannot, and how it is built."""

from __future__ import annotations

from typing import Protocol

from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import group_query_attention, multi_head_attention, onnx_attention
from onnx_attnfuse.targets.emitted import Emitted, Way, Workbench


class Target(Protocol):
    """An operator."""

    OP: str
    DOMAIN: str
    PROVIDERS: frozenset[str]
    """The execution providers on which it is considered."""

    def refuse(self, spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Reason | None:
        """Why this operator cannot compute `spec`, or None if it can."""
        ...

    def ways(self, spec: AttentionSpec, meaning: Meaning) -> tuple[Way, ...]:
        """How the mask can be handed over, and for which batches each way is exact."""
        ...

    def emit(self, spec: AttentionSpec, meaning: Meaning, bench: Workbench, way: Way, *, flat: bool = False) -> Emitted:
        """Builds the operator beside the nodes it replaces."""
        ...


TARGETS: tuple[Target, ...] = (multi_head_attention, group_query_attention, onnx_attention)
