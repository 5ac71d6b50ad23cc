"""PyTorch's flash attention on CUDA: half precision, causal or nothing masked at all, dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.calls import Call, Result, emit_call
from onnx_attnfuse.training.kernels.kernel import (
    Demand,
    Gradients,
    Layout,
    Operands,
    TrainingDevice,
    dims_of,
    dtype_of,
    gradient_results,
    result_dims,
)
from onnx_attnfuse.training.kernels.refusals import HALVES, head_sizes, no_bias, not_square, other_device, other_type

NAME: str = "flash"
LAYOUT: Layout = "bnsh"
SWITCH: Literal["flash", "efficient"] | None = "flash"
_MAX_HEAD_SIZE = 256


def refuse(demand: Demand, device: TrainingDevice, policy: Policy) -> Reason | None:
    """Why it cannot compute that here, or None."""
    del policy
    found = other_device(device, "cuda", 80) or other_type(demand, HALVES) or no_bias(demand) or not_square(demand)
    if found is not None:
        return found
    sizes = head_sizes(demand, _MAX_HEAD_SIZE, 8, same=True)
    if sizes is not None:
        return sizes
    assert isinstance(demand.head_size, int)
    if demand.dropout and demand.head_size > 192 and device.arch not in {80, 90, 100}:
        return Reason("head-size", f"with dropout it takes heads of {demand.head_size} on A100, H100 and newer only")
    return None


def forward(builder: Builder, operands: Operands, hint: str) -> Mapping[str, ir.Value]:
    """Adds the forward call."""
    return forward_call(builder, operands, "_scaled_dot_product_flash_attention", hint)


def forward_call(builder: Builder, operands: Operands, operator: str, hint: str) -> Mapping[str, ir.Value]:
    """A call of the signature that flash attention and cuDNN share."""
    long, dims = ir.DataType.INT64, dims_of(builder, operands.query)
    arguments = (
        ("query", operands.query),
        ("key", operands.key),
        ("value", operands.value),
        ("dropout_p", operands.dropout),
        ("is_causal", operands.causal),
        ("return_debug_mask", False),
        ("scale", operands.scale),
    )
    results = (
        Result("output", dtype_of(builder, operands), result_dims(builder, operands)),
        Result("logsumexp", ir.DataType.FLOAT, dims[:3]),
        Result("cum_seq_q", ir.DataType.INT32),
        Result("cum_seq_k", ir.DataType.INT32),
        Result("max_q", long, (), on_cpu=True),
        Result("max_k", long, (), on_cpu=True),
        Result("philox_seed", long, (), on_cpu=True),
        Result("philox_offset", long, (), on_cpu=True),
        Result("debug_attn_mask", dtype_of(builder, operands)),
    )
    return emit_call(builder, Call(operator, arguments, results), hint)


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
    return backward_call(builder, operands, saved, gradient, "_scaled_dot_product_flash_attention_backward", hint)


def backward_call(
    builder: Builder, operands: Operands, saved: Mapping[str, ir.Value], gradient: ir.Value, operator: str, hint: str
) -> Gradients:
    """A backward call of the signature that flash attention and cuDNN share."""
    arguments = (
        ("grad_out", gradient),
        ("query", operands.query),
        ("key", operands.key),
        ("value", operands.value),
        ("out", saved["output"]),
        ("logsumexp", saved["logsumexp"]),
        ("cum_seq_q", None),
        ("cum_seq_k", None),
        ("max_q", saved["max_q"]),
        ("max_k", saved["max_k"]),
        ("dropout_p", operands.dropout),
        ("is_causal", operands.causal),
        ("philox_seed", saved["philox_seed"]),
        ("philox_offset", saved["philox_offset"]),
        ("scale", operands.scale),
    )
    call = Call(operator, arguments, gradient_results(builder, operands), frozenset(["philox_seed", "philox_offset"]))
    return Gradients(**emit_call(builder, call, hint))
