"""What a kernel is asked, given and asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.calls import Result

Layout = Literal["bnsh", "bsnh"]
"""How operands, result and gradients lie."""


@dataclasses.dataclass(frozen=True)
class TrainingDevice:
    """What the module is trained on."""

    kind: Literal["cpu", "cuda"]
    arch: int = 0
    """Compute capability times ten; 0 on a CPU."""
    torch: tuple[int, int] = (2, 4)
    """PyTorch's version."""
    triton: bool = False
    """ONNX Runtime calls Triton kernels here, and its flash attention is loaded."""

    @property
    def name(self) -> str:
        """`cpu`, or `cuda:sm90`."""
        return self.kind if self.kind == "cpu" else f"cuda:sm{self.arch}"


@dataclasses.dataclass(frozen=True)
class Demand:
    """What one attention asks of a kernel."""

    dtype: ir.DataType | None
    head_size: Dim
    v_head_size: Dim
    bias: bool
    """The mask has to be handed over as numbers that are added to the scores."""
    causal: bool
    """Keys after the row are not seen, counted from the start of both, and nothing else is masked."""
    square: bool
    """There are certainly as many queries as keys."""
    dropout: float
    bias_gradient: bool


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a kernel computes with, in its layout."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None
    causal: bool
    dropout: float
    scale: float


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What the backward part of a kernel gives, in its layout."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None = None


class Kernel(Protocol):
    """A kernel."""

    NAME: str
    LAYOUT: Layout
    SWITCH: Literal["flash", "efficient"] | None
    """The field of `Policy` that asks for it or forbids it."""

    def refuse(self, demand: Demand, device: TrainingDevice, policy: Policy) -> Reason | None:
        """Why it cannot compute that on this device, or None if it can."""
        ...

    def forward(self, builder: Builder, operands: Operands, hint: str) -> Mapping[str, ir.Value]:
        """Adds its forward part; `output` and whatever else the backward part wants, by name."""
        ...

    def backward(
        self,
        builder: Builder,
        operands: Operands,
        saved: Mapping[str, ir.Value],
        gradient: ir.Value,
        hint: str,
        *,
        bias_gradient: bool = False,
    ) -> Gradients:
        """Adds its backward part."""
        ...


def dims_of(builder: Builder, value: ir.Value) -> tuple[Dim, ...]:
    """The shape of an operand, which is known since it was laid out here."""
    dims = builder.facts.dims(value)
    assert dims is not None
    return dims


def result_dims(builder: Builder, operands: Operands) -> tuple[Dim, ...]:
    """The shape of a result: the queries', with the channels of the values."""
    return (*dims_of(builder, operands.query)[:-1], dims_of(builder, operands.value)[-1])


def gradient_results(builder: Builder, operands: Operands) -> tuple[Result, ...]:
    """The results of a backward call that are the gradients of query, key and value, called as in `Gradients`."""
    dtype = dtype_of(builder, operands)
    given = {"query": operands.query, "key": operands.key, "value": operands.value}
    return tuple(Result(name, dtype, dims_of(builder, value)) for name, value in given.items())


def dtype_of(builder: Builder, operands: Operands) -> ir.DataType:
    """The element type of the operands."""
    dtype = builder.facts.dtype(operands.query)
    assert dtype is not None
    return dtype
