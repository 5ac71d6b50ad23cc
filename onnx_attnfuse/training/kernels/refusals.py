"""Refusals that several kernels share."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.kernels.kernel import Demand, TrainingDevice

HALVES = frozenset([ir.DataType.FLOAT16, ir.DataType.BFLOAT16])


def other_device(device: TrainingDevice, kind: str, arch: int = 0) -> Reason | None:
    """Why it does not run there."""
    if device.kind != kind:
        return Reason("other-device", f"it runs on {kind}, and the module is on {device.kind}")
    if device.arch < arch:
        return Reason("old-gpu", f"it needs compute capability {arch / 10}, and the GPU has {device.arch / 10}")
    return None


def other_type(demand: Demand, allowed: frozenset[ir.DataType]) -> Reason | None:
    """Why it has no kernel for the element type."""
    if demand.dtype in allowed:
        return None
    name = "an unknown type" if demand.dtype is None else demand.dtype.name.lower()
    names = " and ".join(sorted(dtype.name.lower() for dtype in allowed))
    return Reason("other-type", f"it takes {names}, and the operands are {name}; torch.autocast makes them half precision")


def no_bias(demand: Demand) -> Reason | None:
    """Why it cannot take the mask, if there is one besides causality."""
    if demand.bias_gradient:
        return Reason("bias-gradient", "what is added to the scores is trained, and it gives no gradient for that")
    return Reason("no-mask", "it takes no mask other than causal") if demand.bias else None


def head_sizes(demand: Demand, largest: int, multiple: int, *, same: bool) -> Reason | None:
    """Why it cannot take heads of these sizes."""
    for size in (demand.head_size, demand.v_head_size):
        if not isinstance(size, int):
            return Reason("unknown-head-size", "the head size is not known before the model runs")
        if size > largest or size % multiple:
            what = f"multiples of {multiple} up to {largest}" if multiple > 1 else f"up to {largest}"
            return Reason("head-size", f"it takes head sizes that are {what}, and here it is {size}")
    if same and demand.head_size != demand.v_head_size:
        return Reason("head-sizes", f"keys have {demand.head_size} channels and values {demand.v_head_size}; it takes equal ones")
    return None


def not_square(demand: Demand) -> Reason | None:
    """Why its triangle may begin elsewhere than the model's."""
    if demand.causal and not demand.square:
        return Reason("unproven-square", "its causal triangle is exact for as many queries as keys, which is not certain here")
    return None
