"""One file per operator that can compute an attention: why it cannot, and how it is built."""

from __future__ import annotations

from typing import Protocol

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets import attention, group_query_attention, multi_head_attention, onnx_attention
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding


class Target(Protocol):
    """An operator."""

    OP: str
    DOMAIN: str
    ALONE: bool
    """Whether the operator takes in what stands before the attention, so that no other operator shares a site with it."""

    def refuse(self, spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
        """Why this operator cannot compute `spec`, or None if it can."""
        ...

    def encodings(self, spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
        """How the mask can be handed over, and for which batches each way is exact."""
        ...

    def emit(
        self, spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding, *, flat: bool = False
    ) -> Emitted:
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
