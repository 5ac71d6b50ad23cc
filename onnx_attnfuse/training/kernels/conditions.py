"""Conditions that kernels put on an attention, each a small function that gives a `Reason` or None."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.kernels.kernel import Condition, Request


def only(*allowed: ir.DataType) -> Condition:
    """The operands have one of these element types."""
    names = " and ".join(sorted(dtype.name.lower() for dtype in allowed))

    def condition(request: Request) -> Reason | None:
        dtype = request.demand.dtype
        if dtype in allowed:
            return None
        name = "an unknown type" if dtype is None else dtype.name.lower()
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
