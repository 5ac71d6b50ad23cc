"""Base types of targets: the context they build with, the encodings of masks, and the fused operator they hand back."""

from __future__ import annotations

import dataclasses
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.spec import Layouts
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.kernels.conditions import MaskForm
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason

Precondition = Literal["always", "right_padded", "unpadded"]
"""Batches for which an encoding is exact: all; padded on the right with a key left in every entry; without padding."""


@dataclasses.dataclass(frozen=True)
class MaskEncoding:
    """One encoding of a mask for an operator, and the batches for which it is exact."""

    mask: MaskForm
    causal: bool = False
    """By the operator's causal attribute."""
    when: Precondition = "always"
    windowed: bool = False
    """The operator leaves out keys that lie too far back."""
    cached: bool = False
    """The operator itself appends keys and values to those of earlier positions."""
    single: bool = False
    """Exact only if batch == 1, query length == 1, or the cache is empty: the operator appends no more at once."""

    band: int | None = None
    """Rows are passed in blocks with the keys they may see: so many more than a block has rows. None: all at once."""

    @property
    def is_exact(self) -> bool:
        """Whether the encoding is exact for every batch."""
        return self.when == "always" and not self.single

    def covers(self, other: MaskEncoding) -> bool:
        """Whether this encoding is exact for every batch that the other is exact for."""
        padding = self.when == other.when or (self.when == "right_padded" and other.when == "unpadded")
        return (padding or self.when == "always") and self.single <= other.single


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """Everything a target builds with: the builder, facts about masks, the device and its opset."""

    builder: Builder
    bounds: Bounds
    reader: Reader
    device: Device
    opset: Opset
    flat: bool = False
    """Whether no operand is taken as (b, n, t, h), as forms for some batches are given those of all."""


def refuse_device(op: str, dtype: ir.DataType | None, device: Device) -> Reason | None:
    """Why an operator, `onnx.` before it if it is a standard one, is not used on a device for an element type, or None."""
    found = support(op, device.provider)
    if isinstance(found, Reason):
        return found
    if dtype == ir.DataType.FLOAT16 and device.provider.rounds_float16 is None:
        return Reason("no-kernel-for-type", f"{op} is not used for float16 on {device.ep}, which is not known to round it or not")
    name = type_name(dtype)
    return None if dtype in found.written else Reason("no-kernel-for-type", f"{op} has no kernel on {device.ep} for {name}")


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
    """The form in which the mask is passed, for a reader."""
    scale: float
    operands: tuple[ir.Value, ...] = ()
    """Values further up than the operands of the attention that it reads in their place."""
    needless: tuple[ir.Value, ...] = ()
    """Values between `operands` and the attention that serve nothing else once it is fused."""
    presents: tuple[tuple[ir.Value, ir.Value], ...] = ()
    """Keys and values with those of earlier positions, as the source has them and as the operator gives them."""
    assumes: tuple[AssumptionName, ...] = ()
    """Assumptions about the scores."""

    @property
    def results(self) -> tuple[tuple[ir.Value, ir.Value], ...]:
        """Pairs of the value that is replaced and the value that replaces it."""
        return (self.replaced, self.value), *self.presents
