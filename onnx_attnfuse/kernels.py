"""Which kernel ONNX Runtime will run for a fused attention, and why not the faster ones before it.

Every condition is one small function that gives a `Reason` or None; a kernel is a name and its conditions; a device is an ordered
list of kernels. The conditions are those of ONNX Runtime 1.31 (docs/targets.md says how each was measured).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.devices import Device
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Reason

MaskForm = Literal["none", "lengths", "ranges", "bias"]
"""How a mask is handed over: not at all, as (b) lengths, as (3b+2) lengths and offsets, as an additive bias."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is asked to do."""

    dtype: ir.DataType
    rows: Dim
    columns: Dim
    head_size: Dim
    v_head_size: Dim
    mask: MaskForm
    causal: bool = False
    arch: int = 0


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a kernel is not chosen."""

    kernel: str
    reason: Reason


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The kernel that will run."""

    kernel: str
    refused: tuple[Refusal, ...]
    """The kernels that would have come before it."""


Condition = Callable[[Problem], "Reason | None"]


def forecast(problem: Problem, device: Device) -> Forecast:
    """The first kernel of the device that takes the problem."""
    problem = dataclasses.replace(problem, arch=device.arch)
    refused: list[Refusal] = []
    for kernel, conditions in _CPU if device.ep == "cpu" else _CUDA:
        reason = next((reason for condition in conditions if (reason := condition(problem)) is not None), None)
        if reason is None:
            return Forecast(kernel, tuple(refused))
        refused.append(Refusal(kernel, reason))
    raise AssertionError("the last kernel takes everything")


def _half(problem: Problem) -> Reason | None:
    if problem.dtype in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        return None
    return Reason("not-half", f"takes float16 and bfloat16, not {problem.dtype.name.lower()}")


def _only(dtype: ir.DataType) -> Condition:
    name = "float32" if dtype == ir.DataType.FLOAT else dtype.name.lower()

    def condition(problem: Problem) -> Reason | None:
        return None if problem.dtype == dtype else Reason(f"not-{name}", f"takes {name}, not {problem.dtype.name.lower()}")

    return condition


def _from_arch(least: int) -> Condition:
    def condition(problem: Problem) -> Reason | None:
        if problem.arch >= least:
            return None
        return Reason("old-architecture", f"is chosen from sm{least} on, this is sm{problem.arch}")

    return condition


def _head_sizes(multiple: int, most: int) -> Condition:
    def condition(problem: Problem) -> Reason | None:
        for name, size in (("head size", problem.head_size), ("value head size", problem.v_head_size)):
            if not isinstance(size, int):
                return Reason("unknown-head-size", f"the {name} is not known")
            if size % multiple or size > most:
                return Reason("head-size", f"{name} {size} is no multiple of {multiple} up to {most}")
        return None

    return condition


def _same_head_sizes(problem: Problem) -> Reason | None:
    if problem.head_size == problem.v_head_size:
        return None
    return Reason("v-head-size", f"value head size {problem.v_head_size} differs from head size {problem.head_size}")


def _masks(*allowed: MaskForm) -> Condition:
    words = {"none": "no mask", "lengths": "lengths", "ranges": "lengths with offsets", "bias": "a bias"}

    def condition(problem: Problem) -> Reason | None:
        if problem.mask in allowed:
            return None
        return Reason("mask-form", f"takes {' or '.join(words[form] for form in allowed)}, and the mask is {words[problem.mask]}")

    return condition


def _not_causal(problem: Problem) -> Reason | None:
    return Reason("causal", "takes no causal attribute") if problem.causal else None


def _aligned_bias(problem: Problem) -> Reason | None:
    multiple = 16 if problem.dtype == ir.DataType.FLOAT else 8
    if problem.mask != "bias" or not isinstance(problem.rows, int) or problem.rows % multiple == 0:
        return None
    return Reason("bias-alignment", f"with a bias the number of queries must be a multiple of {multiple}, it is {problem.rows}")


def _long_float32(problem: Problem) -> Reason | None:
    short = isinstance(problem.rows, int) and isinstance(problem.columns, int) and max(problem.rows, problem.columns) < 256
    if problem.dtype == ir.DataType.FLOAT and short:
        return Reason("short-float32", "in float32 it is chosen from 256 queries or keys on")
    return None


_CUDA: tuple[tuple[str, tuple[Condition, ...]], ...] = (
    ("CUDNN_FLASH_ATTENTION", (_from_arch(90), _half, _head_sizes(8, 256), _masks("none", "lengths", "bias"))),
    ("FLASH_ATTENTION", (_from_arch(80), _only(ir.DataType.FLOAT16), _masks("none"), _same_head_sizes, _head_sizes(8, 256))),
    ("EFFICIENT_ATTENTION", (_masks("none", "ranges", "bias"), _head_sizes(8, 1024), _aligned_bias, _long_float32)),
    ("MATH", ()),
)
_CPU: tuple[tuple[str, tuple[Condition, ...]], ...] = (
    ("FLASH_ATTENTION", (_only(ir.DataType.FLOAT), _masks("none"), _not_causal)),
    ("MATH", ()),
)
