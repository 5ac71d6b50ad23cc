"""One file per operator that can compute an attention: why it cannot, and how it is built."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.kernels.operators import OpInfo, ranked
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets import unfused
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding


class Target(Protocol):
    """The module of an operator."""

    INFO: OpInfo
    ALONE: bool
    """Whether the operator takes in nodes before the attention, so that no other operator shares a site with it."""

    def refuse(self, spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
        """Why this operator cannot compute `spec`, or None if it can."""
        ...

    def encodings(self, spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
        """How the mask can be passed, and for which batches each way is exact."""
        ...

    def emit(self, spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
        """Builds the operator beside the nodes it replaces."""
        ...


TARGETS: tuple[Target, ...] = tuple(cast("Target", importlib.import_module(info.target or "")) for info in ranked())
"""In the order in which they are taken where they are equally fast."""
UNFUSED = cast("Target", unfused)
"""Taken besides these for providers that fuse decomposed attention themselves."""


def name_of(target: Target) -> str:
    """The name that a caller has for a target: the operator's, with `onnx.` before those of the standard."""
    return target.INFO.key
