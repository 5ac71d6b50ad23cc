"""PyTorch's flash attention on the CPU: any mask as a bias, no dropout."""

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
from onnx_attnfuse.training.kernels.refusals import no_bias_gradient, no_dropout, other_device, other_head_sizes, other_type

NAME: str = "flash (CPU)"
LAYOUT: Layout = "bnsh"
SWITCH: Literal["flash", "efficient"] | None = "flash"
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_TYPES = frozenset([ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16])


def refuse(demand: Demand, device: TrainingDevice, policy: Policy) -> Reason | None:
    """Why it cannot compute that here, or None."""
    del policy
    common = other_device(device, "cpu") or other_type(demand, _TYPES)
    return common or no_dropout(demand) or no_bias_gradient(demand) or other_head_sizes(demand)


def forward(builder: Builder, operands: Operands, hint: str) -> Mapping[str, ir.Value]:
    """Adds the forward call: `output` and `logsumexp`."""
    rows = dims_of(builder, operands.query)[:3]
    arguments = (
        ("query", operands.query),
        ("key", operands.key),
        ("value", operands.value),
        ("dropout_p", 0.0),
        ("is_causal", operands.causal),
        ("attn_mask", operands.bias),
        ("scale", operands.scale),
    )
    results = (
        Result("output", dtype_of(builder, operands), result_dims(builder, operands)),
        Result("logsumexp", ir.DataType.FLOAT, rows),
    )
    return emit_call(builder, Call(_FORWARD, arguments, results), hint)


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
    arguments = (
        ("grad_out", gradient),
        ("query", operands.query),
        ("key", operands.key),
        ("value", operands.value),
        ("out", saved["output"]),
        ("logsumexp", saved["logsumexp"]),
        ("dropout_p", 0.0),
        ("is_causal", operands.causal),
        ("attn_mask", operands.bias),
        ("scale", operands.scale),
    )
    call = Call(f"{_FORWARD}_backward", arguments, gradient_results(builder, operands))
    return Gradients(**emit_call(builder, call, hint))
