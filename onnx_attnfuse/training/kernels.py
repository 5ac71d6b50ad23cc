"""Kernels of PyTorch with a gradient: where each runs, under which conditions, and whether it is deterministic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.dtypes import HALVES, type_name
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Reason, Refused

DeviceKind = Literal["cpu", "cuda"]
Determinism = Literal["always", "if asked", "never"]
"""Gradients are the same bit for bit: in any case, under `torch.use_deterministic_algorithms(True)`, or never."""


@dataclasses.dataclass(frozen=True)
class TrainingDevice:
    """The device that a module is trained on."""

    kind: DeviceKind
    arch: int = 0
    """Compute capability times ten; 0 on a CPU."""
    torch: tuple[int, int] = (2, 4)
    """PyTorch's version."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingKernel:
    """An attention kernel with a gradient."""

    name: str
    device: DeviceKind
    arch: int = 0
    """The least compute capability, times ten."""
    switch: Literal["flash", "efficient"] | None = None
    """The field of `Policy` that asks for the kernel or forbids it."""
    backend: str = ""
    """Its name in `torch.nn.attention.SDPBackend`."""
    determinism: Determinism = "always"
    conditions: tuple[Condition, ...]
    """The conditions in the order in which they are asked; the first that is not met is the reason."""

    @property
    def key(self) -> str:
        """The name by which it is asked for, whatever the device is."""
        return self.name.partition(" ")[0].lower()

    def refuse(self, demand: Demand, device: TrainingDevice) -> Reason | None:
        """Why the kernel cannot compute an attention on a device, or None if it can."""
        if device.kind != self.device:
            return Reason("other-device", f"it runs on {self.device}, and the module is on {device.kind}")
        if device.arch < self.arch:
            return Reason("old-gpu", f"it needs compute capability {self.arch / 10}, and the GPU has {device.arch / 10}")
        reasons = (condition(Request(demand, device)) for condition in self.conditions)
        return next((reason for reason in reasons if reason is not None), None)


def only(*allowed: ir.DataType) -> Condition:
    """The operands have one of these element types."""
    names = " and ".join(sorted(type_name(dtype) for dtype in allowed))

    def condition(request: Request) -> Reason | None:
        dtype = request.demand.dtype
        if dtype in allowed:
            return None
        name = type_name(dtype)
        return Reason("other-type", f"it takes {names}, and the operands are {name}; torch.autocast makes them half precision")

    return condition


def head_sizes(largest: int, multiple: int) -> Condition:
    """Both head sizes are known, multiples of a number, and not too large."""
    wanted = f"multiples of {multiple} up to {largest}" if multiple > 1 else f"up to {largest}"

    def condition(request: Request) -> Reason | None:
        for size in (request.demand.head_size, request.demand.v_head_size):
            if not isinstance(size, int):
                return Reason("unknown-head-size", "the head size is not known before the model runs")
            if size > largest or size % multiple:
                return Reason("head-size", f"it takes head sizes that are {wanted}, and here it is {size}")
        return None

    return condition


def same_head_sizes(request: Request) -> Reason | None:
    """Values are as wide as queries and keys."""
    size, v_size = request.demand.head_size, request.demand.v_head_size
    return None if size == v_size else Reason("head-sizes", f"keys have {size} channels and values {v_size}; it takes equal ones")


def no_dropout(request: Request) -> Reason | None:
    """No weights are dropped."""
    share = request.demand.dropout
    return Reason("dropout", f"it has no dropout, and {share:g} of the weights are dropped") if share else None


def no_bias_gradient(request: Request) -> Reason | None:
    """Nothing that is trained is added to the scores."""
    if not request.demand.bias_gradient:
        return None
    return Reason("bias-gradient", "the term added to the scores is trained, and the kernel gives no gradient for it")


def no_bias(request: Request) -> Reason | None:
    """Only keys after the row are masked."""
    return Reason("no-mask", "it takes no mask other than causal") if request.demand.bias else None


def square_if_causal(request: Request) -> Reason | None:
    """A causal triangle begins where the model's does, which is certain for as many queries as keys."""
    if request.demand.causal and not request.demand.square:
        return Reason("unproven-square", "its causal triangle is exact for as many queries as keys, which is not certain here")
    return None


def large_heads_without_dropout(request: Request) -> Reason | None:
    """Heads beyond 192 channels have dropout on some GPUs only."""
    size = request.demand.head_size
    assert isinstance(size, int)
    if request.demand.dropout and size > 192 and request.device.arch not in {80, 90, 100}:
        return Reason("head-size", f"with dropout it takes heads of {size} on A100, H100 and newer only")
    return None


def types_of_gpu(request: Request) -> Reason | None:
    """The element type is float32 or half precision, bfloat16 from A100 on."""
    halves = HALVES if request.device.arch >= 80 else [ir.DataType.FLOAT16]
    return only(*halves, ir.DataType.FLOAT)(request)


def aligned_heads(request: Request) -> Reason | None:
    """Heads fill pieces of 16 bytes."""
    return head_sizes(1 << 16, 4 if request.demand.dtype == ir.DataType.FLOAT else 8)(request)


def check_differentiable(spec: AttentionSpec) -> None:
    """Refuses attention that no call with a gradient computes.

    A factor that is not positive is among it: where a triangle is asked for, kernels multiply scores masked with -inf.

    Raises:
        Refused: A factor that is not positive, weights that are multiplied, or several types.
    """
    if not spec.scale > 0:
        raise Refused("scale-not-positive", f"the scores are scaled by {spec.scale:g}, with which kernels of PyTorch give NaN")
    if spec.renormalized is not None:
        raise Refused("scaled-weights", "the weights are masked after the softmax and divided by their sum, which may vanish")
    if spec.unshifted:
        raise Refused(
            "unshifted-exponentials", "no row maximum is subtracted before exponentials, which overflow where kernels do not"
        )
    if spec.result_scales:
        raise Refused("scaled-weights", "the weights are multiplied after the softmax, which no kernel differentiates")
    if spec.dtype is None or spec.output_dtype != spec.dtype:
        raise Refused("mixed-types", "operands and result are of different or unknown types")


FLASH = TrainingKernel(
    name="flash",
    device="cuda",
    arch=80,
    switch="flash",
    backend="FLASH_ATTENTION",
    determinism="if asked",
    conditions=(
        only(*HALVES),
        no_bias_gradient,
        no_bias,
        square_if_causal,
        head_sizes(256, 8),
        same_head_sizes,
        large_heads_without_dropout,
    ),
)
"""Flash attention on CUDA: half precision, causal or nothing masked at all, dropout."""
CUDNN = TrainingKernel(
    name="cuDNN",
    device="cuda",
    arch=90,
    backend="CUDNN_ATTENTION",
    determinism="never",
    conditions=(only(*HALVES), no_bias_gradient, no_bias, square_if_causal, head_sizes(128, 8), same_head_sizes, no_dropout),
)
"""cuDNN's attention: half precision, causal or nothing masked."""
EFFICIENT = TrainingKernel(
    name="efficient",
    device="cuda",
    arch=50,
    switch="efficient",
    backend="EFFICIENT_ATTENTION",
    determinism="if asked",
    conditions=(types_of_gpu, aligned_heads),
)
"""The memory-efficient kernel: any mask as a bias, and its gradient; dropout."""
CPU_FLASH = TrainingKernel(
    name="flash (CPU)",
    device="cpu",
    switch="flash",
    backend="FLASH_ATTENTION",
    conditions=(only(*HALVES, ir.DataType.FLOAT, ir.DataType.DOUBLE), no_dropout, no_bias_gradient, same_head_sizes),
)
"""Flash attention on the CPU: any mask as a bias, no dropout."""
