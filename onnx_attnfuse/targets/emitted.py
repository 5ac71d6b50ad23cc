"""What a target is given and what it hands back: a fused operator that stands beside the nodes it replaces."""

from __future__ import annotations

import dataclasses
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.conditions import MaskForm
from onnx_attnfuse.devices import Device
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.spec import Layouts

When = Literal["always", "right_padded", "unpadded"]
"""For which batches something is exact: all; those padded on the right with a key left in every entry; those without padding."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to hand a mask to an operator."""

    mask: MaskForm
    causal: bool = False
    """By the operator's causal attribute."""
    when: When = "always"
    windowed: bool = False
    """The operator leaves out keys that lie too far back."""
    cached: bool = False
    """The operator itself appends keys and values to those of earlier positions."""
    single: bool = False
    """Only for one entry, or one new position in each, or nothing cached: the operator takes no more at once."""

    @property
    def is_exact(self) -> bool:
        """Whether it is exact for every batch."""
        return self.when == "always" and not self.single

    def covers(self, other: Way) -> bool:
        """Whether it is exact for every batch that the other is exact for."""
        padding = self.when == other.when or (self.when == "right_padded" and other.when == "unpadded")
        return (padding or self.when == "always") and self.single <= other.single


@dataclasses.dataclass(frozen=True)
class Workbench:
    """What a target builds with."""

    builder: Builder
    bounds: Bounds
    reader: Reader
    device: Device
    opset: Opset


@dataclasses.dataclass(frozen=True)
class Emitted:
    """The new nodes of one site, not connected yet."""

    replaced: ir.Value
    """The value of the source that `value` takes the place of."""
    value: ir.Value
    node: ir.Node
    """The fused operator."""
    layouts: Layouts
    mask: str
    """The form in which the mask is handed over, for a reader."""
    scale: float
    operands: tuple[ir.Value, ...] = ()
    """Values further up than the operands of the attention that it reads in their place."""
    needless: tuple[ir.Value, ...] = ()
    """What lies between these and the attention, and serves nothing else."""
    presents: tuple[tuple[ir.Value, ir.Value], ...] = ()
    """Keys and values with those of earlier positions, as the source has them and as the operator gives them."""

    @property
    def results(self) -> tuple[tuple[ir.Value, ir.Value], ...]:
        """What is replaced, and what by."""
        return (self.replaced, self.value), *self.presents
