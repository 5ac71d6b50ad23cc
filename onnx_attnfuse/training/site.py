"""What is known of one attention in training: the forward part as the engine reads it, and the backward part."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.axes.views import Laid
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attention weights set to 0 at random, the others divided by what is left."""

    node: ir.Node
    ratio: float
    mask: ir.Value | None
    """Where weights are kept; the backward part reads it."""


@dataclasses.dataclass(frozen=True)
class BiasGradient:
    """A value that is the gradient of the scores, times a number, as the gradient of something added to them."""

    laid: Laid
    factor: float


@dataclasses.dataclass(frozen=True)
class Backward:
    """The gradients of one attention: what they are computed from, and the values that hold them."""

    output: Laid
    """The gradient of the result, which all others are computed from."""
    query: Laid | None
    """None for an operand whose gradient nobody asks for; the same for key and value."""
    key: Laid | None
    value: Laid | None
    biases: tuple[BiasGradient, ...] = ()
    inner: tuple[ir.Value, ...] = ()
    """Values between these, which nothing else looks at."""

    @property
    def results(self) -> tuple[Laid, ...]:
        """The gradients of the operands that there are."""
        return tuple(laid for laid in (self.query, self.key, self.value) if laid is not None)


@dataclasses.dataclass(frozen=True)
class TrainingSite:
    """One attention with its gradients."""

    spec: AttentionSpec
    meaning: Meaning
    backward: Backward
    dropout: Dropout | None
