"""One attention in training: the forward part as the engine reads it, and the backward part."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec


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

    indexed: IndexedValue
    factor: float


@dataclasses.dataclass(frozen=True)
class Backward:
    """The gradients of one attention: what they are computed from, and the values that hold them."""

    output: IndexedValue
    """The gradient of the result, which all others are computed from."""
    query: IndexedValue | None
    """None for an operand whose gradient nobody asks for; the same for key and value."""
    key: IndexedValue | None
    value: IndexedValue | None
    biases: tuple[BiasGradient, ...] = ()
    inner: tuple[ir.Value, ...] = ()
    """Values between these, which nothing else looks at."""

    @property
    def results(self) -> tuple[IndexedValue, ...]:
        """The gradients of the operands that there are."""
        return tuple(indexed for indexed in (self.query, self.key, self.value) if indexed is not None)


@dataclasses.dataclass(frozen=True)
class TrainingSite:
    """One attention with its gradients."""

    spec: AttentionSpec
    meaning: Meaning
    backward: Backward
    dropout: Dropout | None
