"""Kernels as records: the device and the conditions of each; operands and gradients; how both parts are called."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Reason

Layout = Literal["bnsh", "bsnh"]
"""How operands, result and gradients lie."""
DeviceKind = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class TrainingDevice:
    """The device that a module is trained on."""

    kind: DeviceKind
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
    """The features of an attention that a kernel may lack."""

    dtype: ir.DataType | None
    head_size: Dim
    v_head_size: Dim
    bias: bool
    """The mask has to be passed as numbers that are added to the scores."""
    causal: bool
    """Keys after the row are not seen, counted from the start of both, and nothing else is masked."""
    square: bool
    """There are certainly as many queries as keys."""
    dropout: float
    bias_gradient: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """A demand on a device, which conditions of kernels are asked about."""

    demand: Demand
    device: TrainingDevice


Condition = Callable[[Request], "Reason | None"]
"""Why a kernel cannot meet a request, or None."""


@dataclasses.dataclass(frozen=True)
class KernelOperands:
    """The operands of a kernel, in its layout."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None
    causal: bool
    dropout: float
    scale: float


@dataclasses.dataclass(frozen=True)
class KernelGradients:
    """The gradients that the backward part of a kernel gives, in its layout."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingKernel(abc.ABC):
    """An attention kernel with a gradient."""

    name: str
    layout: Layout
    device: DeviceKind
    arch: int = 0
    """The least compute capability, times ten."""
    switch: Literal["flash", "efficient"] | None = None
    """The field of `Policy` that asks for the kernel or forbids it."""
    conditions: tuple[Condition, ...]
    """The conditions in the order in which they are asked; the first that is not met is the reason."""

    def refuse(self, demand: Demand, device: TrainingDevice) -> Reason | None:
        """Why the kernel cannot compute an attention on a device, or None if it can."""
        if device.kind != self.device:
            return Reason("other-device", f"it runs on {self.device}, and the module is on {device.kind}")
        if device.arch < self.arch:
            return Reason("old-gpu", f"it needs compute capability {self.arch / 10}, and the GPU has {device.arch / 10}")
        reasons = (condition(Request(demand, device)) for condition in self.conditions)
        return next((reason for reason in reasons if reason is not None), None)

    @abc.abstractmethod
    def forward(self, builder: Builder, operands: KernelOperands, hint: str) -> Mapping[str, ir.Value]:
        """Adds the forward part.

        Returns:
            `output`, and whatever else the backward part needs, by name.
        """

    @abc.abstractmethod
    def backward(self, builder: Builder, call: BackwardCall) -> KernelGradients:
        """Adds the backward part."""


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """A call of the backward part of a kernel."""

    kernel: TrainingKernel
    operands: KernelOperands
    """The operands of the forward part."""
    saved: Mapping[str, ir.Value]
    """The results of the forward part by name."""
    gradient: ir.Value
    """The gradient of `output`."""
    hint: str
    """The name of the new node, made unique."""
    bias_gradient: bool = False
    """The gradient of the bias is wanted, of a kernel that does not refuse it."""

    def emit(self, builder: Builder) -> KernelGradients:
        """Adds the call of the kernel."""
        return self.kernel.backward(builder, self)


def result_dims(builder: Builder, operands: KernelOperands) -> tuple[Dim, ...]:
    """The shape of a result: the queries', with the channels of the values."""
    return (*dims_of(builder, operands.query)[:-1], dims_of(builder, operands.value)[-1])


def dtype_of(builder: Builder, operands: KernelOperands) -> ir.DataType:
    """The element type of the operands."""
    dtype = builder.facts.dtype(operands.query)
    assert dtype is not None
    return dtype
