"""Keys padded to a multiple, for kernels that read a bias in blocks: keys of zeros that -inf forbids take no weight."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.training.kernels.kernel import KernelGradients, KernelOperands


def padded(builder: Builder, operands: KernelOperands, block: int) -> KernelOperands:
    """KernelOperands in (b, s, n, h), keys padded to a multiple of a number and the bias with every axis at full length.

    Args:
        builder: What to build with.
        operands: The operands; nothing is done without a bias.
        block: The number.
    """
    if operands.bias is None:
        return operands
    batch, rows, heads, _ = dims_of(builder, operands.query)
    keys = dims_of(builder, operands.key)[1]
    wanted = (batch, heads, rows, keys)
    dims = dims_of(builder, operands.bias)
    bias = operands.bias if dims == wanted else builder.expand(operands.bias, wanted, [True] * 4)
    if isinstance(keys, int) and keys % block == 0:
        return dataclasses.replace(operands, bias=bias)
    key, value = (_extended(builder, item, 1, 0.0, block) for item in (operands.key, operands.value))
    return dataclasses.replace(operands, key=key, value=value, bias=_extended(builder, bias, 3, -math.inf, block))


def trimmed(builder: Builder, gradients: KernelGradients, operands: KernelOperands) -> KernelGradients:
    """KernelGradients in (b, s, n, h) without those of keys that `padded` added to the operands."""
    keys = dims_of(builder, operands.key)[1]
    key, value = (_cut(builder, item, 1, keys) for item in (gradients.key, gradients.value))
    bias = None if gradients.bias is None else _cut(builder, gradients.bias, 3, keys)
    return KernelGradients(gradients.query, key, value, bias)


def _extended(builder: Builder, value: ir.Value, axis: int, fill: float, block: int) -> ir.Value:
    """`value` with numbers appended along an axis, to a multiple of `block`."""
    dims, long = dims_of(builder, value), ir.DataType.INT64
    size = builder.shape([dims[axis]])
    more = builder.node(
        "Mod", [builder.node("Neg", [size], dims=[1], dtype=long), builder.constant([block])], dims=[1], dtype=long
    )
    before = builder.constant([0] * (len(dims) + axis))
    parts = [before, more, *([builder.constant([0] * (len(dims) - axis - 1))] if axis < len(dims) - 1 else [])]
    pads = builder.node("Concat", parts, {"axis": 0}, dims=[2 * len(dims)], dtype=long)
    number, dtype = builder.scalar(fill, builder.facts.dtype(value)), builder.facts.dtype(value)
    extended = builder.node("Pad", [value, pads, number], dtype=dtype)
    new = [builder.facts.fresh(extended, axis) if place == axis else dim for place, dim in enumerate(dims)]
    builder.facts.record(extended, new, dtype)
    return extended


def _cut(builder: Builder, value: ir.Value, axis: int, size: Dim) -> ir.Value:
    """The first `size` entries of an axis."""
    return value if dims_of(builder, value)[axis] == size else builder.slice(value, axis, 0, size)
