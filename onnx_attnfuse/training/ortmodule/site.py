"""An attention in training: its forward part as a specification, its gradients, its dropout."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attention weights set to 0 at random, the others divided by the share that is left."""

    node: ir.Node
    ratio: float
    mask: ir.Value | None
    """The mask of weights that are kept, which the backward part reads."""


@dataclasses.dataclass(frozen=True)
class BiasGradient:
    """A value that is the gradient of the scores, times a number, as the gradient of something added to them."""

    indexed: IndexedValue
    factor: float


@dataclasses.dataclass(frozen=True)
class Backward:
    """The gradients of an attention: their operands, and the values that hold them."""

    output: IndexedValue
    """The gradient of the result, which all others are computed from."""
    query: IndexedValue | None
    """None for an operand whose gradient nobody asks for; the same for key and value."""
    key: IndexedValue | None
    value: IndexedValue | None
    biases: tuple[BiasGradient, ...] = ()
    inner: tuple[ir.Value, ...] = ()
    """Values between the gradients, which nothing else looks at."""

    @property
    def results(self) -> tuple[IndexedValue, ...]:
        """The gradients of the operands, as far as anything asks for them."""
        return tuple(indexed for indexed in (self.query, self.key, self.value) if indexed is not None)


@dataclasses.dataclass(frozen=True)
class TrainingSite:
    """An attention with its gradients."""

    spec: AttentionSpec
    meaning: Meaning
    backward: Backward
    dropout: Dropout | None
    zeroed: bool = False
    """Rows whose mask is -inf throughout are zeros, and have no gradient."""
