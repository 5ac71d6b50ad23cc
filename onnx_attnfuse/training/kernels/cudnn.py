"""cuDNN's attention as PyTorch 2.4 calls it: half precision, causal or nothing masked, where flash attention is not taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.kernels.flash import backward_call, forward_call
from onnx_attnfuse.training.kernels.kernel import Demand, Gradients, Layout, Operands, TrainingDevice
from onnx_attnfuse.training.kernels.refusals import HALVES, head_sizes, no_bias, not_square, other_device, other_type

NAME: str = "cuDNN"
LAYOUT: Layout = "bnsh"
SWITCH: Literal["flash", "efficient"] | None = None
_OPERATOR = "_scaled_dot_product_cudnn_attention"
_CHANGED = (2, 5)
"""From this version of PyTorch on the operator has another signature."""


def refuse(demand: Demand, device: TrainingDevice, policy: Policy) -> Reason | None:
    """Why it cannot compute that here, or None."""
    del policy
    found = other_device(device, "cuda", 90) or other_type(demand, HALVES) or no_bias(demand) or not_square(demand)
    found = found or head_sizes(demand, 128, 8, same=True)
    if found is not None:
        return found
    if device.torch >= _CHANGED:
        return Reason("other-torch", f"its call is that of PyTorch 2.4, and this is {device.torch[0]}.{device.torch[1]}")
    if demand.dropout:
        return Reason("dropout", "it is not used with dropout")
    return None


def forward(builder: Builder, operands: Operands, hint: str) -> Mapping[str, ir.Value]:
    """Adds the forward call."""
    return forward_call(builder, operands, _OPERATOR, hint)


def backward(
    builder: Builder,
    operands: Operands,
    saved: Mapping[str, ir.Value],
    gradient: ir.Value,
    hint: str,
    *,
    bias_gradient: bool = False,
) -> Gradients:
    """Adds the backward call."""
    assert not bias_gradient
    return backward_call(builder, operands, saved, gradient, f"{_OPERATOR}_backward", hint)
