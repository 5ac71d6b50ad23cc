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


def no_dropout(demand: Demand) -> Reason | None:
    """Why it cannot drop weights, if some are dropped."""
    return Reason("dropout", f"it has no dropout, and {demand.dropout:g} of the weights are dropped") if demand.dropout else None


def no_bias_gradient(demand: Demand) -> Reason | None:
    """Why it cannot give the gradient of the mask, if that is wanted."""
    if not demand.bias_gradient:
        return None
    return Reason("bias-gradient", "what is added to the scores is trained, and it gives no gradient for that")


def no_bias(demand: Demand) -> Reason | None:
    """Why it cannot take the mask, if there is one besides causality."""
    return no_bias_gradient(demand) or (Reason("no-mask", "it takes no mask other than causal") if demand.bias else None)


def head_sizes(demand: Demand, largest: int, multiple: int, *, same: bool) -> Reason | None:
    """Why it cannot take heads of these sizes."""
    for size in (demand.head_size, demand.v_head_size):
        if not isinstance(size, int):
            return Reason("unknown-head-size", "the head size is not known before the model runs")
        if size > largest or size % multiple:
            what = f"multiples of {multiple} up to {largest}" if multiple > 1 else f"up to {largest}"
            return Reason("head-size", f"it takes head sizes that are {what}, and here it is {size}")
    return other_head_sizes(demand) if same else None


def other_head_sizes(demand: Demand) -> Reason | None:
    """Why it cannot take keys and values of different sizes, if they are."""
    if demand.head_size == demand.v_head_size:
        return None
    return Reason("head-sizes", f"keys have {demand.head_size} channels and values {demand.v_head_size}; it takes equal ones")


def not_square(demand: Demand) -> Reason | None:
    """Why its triangle may begin elsewhere than the model's."""
    if demand.causal and not demand.square:
        return Reason("unproven-square", "its causal triangle is exact for as many queries as keys, which is not certain here")
    return None
