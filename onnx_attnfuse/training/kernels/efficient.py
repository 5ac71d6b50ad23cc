"""PyTorch's memory-efficient attention on CUDA: any mask as a bias, and its gradient; dropout.

It reads a bias in pieces of 16 bytes, so keys are padded to a multiple of 8 where a bias is handed over: keys of zeros that -inf
forbids take no weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
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
    result_dims,
)
from onnx_attnfuse.training.kernels.refusals import HALVES, head_sizes, other_device, other_type

NAME: str = "efficient"
LAYOUT: Layout = "bsnh"
SWITCH: Literal["flash", "efficient"] | None = "efficient"
_FORWARD, _BACKWARD = "_efficient_attention_forward", "_efficient_attention_backward"
_CAUSAL_FROM_TOP_LEFT = 1
_PIECE = 8
"""Elements of a bias that are read at once."""


def refuse(demand: Demand, device: TrainingDevice, policy: Policy) -> Reason | None:
    """Why it cannot compute that here, or None."""
    del policy
    types = HALVES | {ir.DataType.FLOAT} if device.arch >= 80 else frozenset([ir.DataType.FLOAT16, ir.DataType.FLOAT])
    common = other_device(device, "cuda", 50) or other_type(demand, types)
    return common or head_sizes(demand, 1 << 16, 4 if demand.dtype == ir.DataType.FLOAT else 8, same=False)


def forward(builder: Builder, operands: Operands, hint: str) -> Mapping[str, ir.Value]:
    """Adds the forward call."""
    given, long = _padded(builder, operands), ir.DataType.INT64
    arguments = (
        ("query", given.query),
        ("key", given.key),
        ("value", given.value),
        ("bias", given.bias),
        ("cu_seqlens_q", None),
        ("cu_seqlens_k", None),
        ("max_seqlen_q", None),
        ("max_seqlen_k", None),
        ("dropout_p", operands.dropout),
        ("custom_mask_type", _CAUSAL_FROM_TOP_LEFT if operands.causal else 0),
        ("compute_log_sumexp", True),
        ("scale", operands.scale),
        ("seqlen_k", None),
        ("window_size", None),
    )
    results = (
        Result("output", dtype_of(builder, operands), result_dims(builder, operands)),
        Result("logsumexp", ir.DataType.FLOAT),
        Result("philox_seed", long, (), on_cpu=True),
        Result("philox_offset", long, (), on_cpu=True),
        Result("max_seqlen_batch_q", long, (), on_cpu=True),
        Result("max_seqlen_batch_k", long, (), on_cpu=True),
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
    given = _padded(builder, operands)
    arguments = (
        ("grad_out_", gradient),
        ("query", given.query),
        ("key", given.key),
        ("value", given.value),
        ("bias", given.bias),
        ("out", saved["output"]),
        ("cu_seqlens_q", None),
        ("cu_seqlens_k", None),
        ("max_seqlen_q", saved["max_seqlen_batch_q"]),
        ("max_seqlen_k", saved["max_seqlen_batch_k"]),
        ("logsumexp", saved["logsumexp"]),
        ("dropout_p", operands.dropout),
        ("philox_seed", saved["philox_seed"]),
        ("philox_offset", saved["philox_offset"]),
        ("custom_mask_type", _CAUSAL_FROM_TOP_LEFT if operands.causal else 0),
        ("bias_requires_grad", bias_gradient),
        ("scale", operands.scale),
        ("num_splits_key", None),
        ("window_size", None),
        ("shared_storage_dqdkdv", False),
    )
    dtype = dtype_of(builder, operands)
    wanted = {"query": given.query, "key": given.key, "value": given.value, "bias": given.bias if bias_gradient else None}
    results = tuple(Result(name, dtype, None if value is None else dims_of(builder, value)) for name, value in wanted.items())
    found = emit_call(builder, Call(_BACKWARD, arguments, results, frozenset(["philox_seed", "philox_offset"])), hint)
    keys = dims_of(builder, operands.key)[1]
    trimmed = {name: _trimmed(builder, found[name], 1, keys) for name in ("key", "value")}
    bias = _trimmed(builder, found["bias"], 3, keys) if bias_gradient else None
    return Gradients(found["query"], trimmed["key"], trimmed["value"], bias)


def _padded(builder: Builder, operands: Operands) -> Operands:
    """The operands with keys to a multiple of what is read at once, the bias with every axis at full length."""
    if operands.bias is None:
        return operands
    batch, rows, heads, _ = dims_of(builder, operands.query)
    keys = dims_of(builder, operands.key)[1]
    wanted = (batch, heads, rows, keys)
    dims = dims_of(builder, operands.bias)
    bias = operands.bias if dims == wanted else builder.expand(operands.bias, wanted, [True] * 4)
    if isinstance(keys, int) and keys % _PIECE == 0:
        return dataclasses.replace(operands, bias=bias)
    key, value = (_extended(builder, item, 1, 0.0) for item in (operands.key, operands.value))
    return dataclasses.replace(operands, key=key, value=value, bias=_extended(builder, bias, 3, -math.inf))


def _extended(builder: Builder, value: ir.Value, axis: int, fill: float) -> ir.Value:
    """`value` with numbers appended along an axis, to a multiple of what is read at once."""
    dims, long = dims_of(builder, value), ir.DataType.INT64
    size = builder.shape([dims[axis]])
    more = builder.node(
        "Mod", [builder.node("Neg", [size], dims=[1], dtype=long), builder.constant([_PIECE])], dims=[1], dtype=long
    )
    before = builder.constant([0] * (len(dims) + axis))
    parts = [before, more, *([builder.constant([0] * (len(dims) - axis - 1))] if axis < len(dims) - 1 else [])]
    pads = builder.node("Concat", parts, {"axis": 0}, dims=[2 * len(dims)], dtype=long)
    number, dtype = builder.scalar(fill, builder.facts.dtype(value)), builder.facts.dtype(value)
    padded = builder.node("Pad", [value, pads, number], dtype=dtype)
    new = [builder.facts.fresh(padded, axis) if place == axis else dim for place, dim in enumerate(dims)]
    builder.facts.record(padded, new, dtype)
    return padded


def _trimmed(builder: Builder, value: ir.Value, axis: int, size: Dim) -> ir.Value:
    """`value` without what was appended."""
    dims: Sequence[Dim] = dims_of(builder, value)
    return value if dims[axis] == size else builder.slice(value, axis, 0, size)
