"""Normalizations decomposed: those of com.microsoft with a sum in front, one of branches, and two of ai.onnx."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import over_root
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.reasons import Refused

_FLOAT, _EPSILON, _EPSILON_OF_SUMS = ir.DataType.FLOAT, 1e-5, 1e-12
_LAYER_SINCE = 17


def skip_layer(fused: FusedNode) -> Body:
    """SkipLayerNormalization: a sum and LayerNormalization of it."""
    build, total, dtype = fused.build, _total(fused), fused.dtype()
    weights = [fused.operand("gamma"), *fused.all_given("beta")]
    epsilon, dims = fused.attribute("epsilon", _EPSILON_OF_SUMS), fused.dims(total)
    if build.opset >= _LAYER_SINCE:
        attributes = {"axis": -1, "epsilon": epsilon}
        result = build.node("LayerNormalization", [total, *weights], attributes, dims=dims, dtype=dtype)
    else:
        wide = build.cast(total, _FLOAT)
        level = build.elementwise("Sub", [wide, build.reduce("ReduceMean", wide, [len(dims) - 1])], _FLOAT)
        result = _weighted(build, over_root(build, level, dtype, [len(dims) - 1], epsilon), weights, dtype)
    return _with_sum(fused, result, total)


def skip_rms(fused: FusedNode) -> Body:
    """SkipSimplifiedLayerNormalization: a sum over the root of the mean of its squares."""
    total, dtype = _total(fused), fused.dtype()
    epsilon = fused.attribute("epsilon", _EPSILON_OF_SUMS)
    level = over_root(fused.build, total, dtype, [len(fused.dims(total)) - 1], epsilon)
    return _with_sum(fused, _weighted(fused.build, level, [fused.operand("gamma")], dtype), total)


def rms(fused: FusedNode) -> Body:
    """RMSNormalization, computed in float32.

    Raises:
        Refused: It is computed in another type, or its weight is of another one than its input.
    """
    build, operand, weight, dtype = fused.build, fused.operand("X"), fused.operand("scale"), fused.dtype()
    _check_type(fused)
    if build.facts.dtype(weight) != dtype:
        raise Refused("malformed", "the types of the normalized input and of its weight differ", fused.node.name)
    rank = len(fused.dims(operand))
    axes = range(fused.attribute("axis", -1) % rank, rank)
    level = over_root(build, operand, dtype, axes, fused.attribute("epsilon", _EPSILON))
    return Body((_weighted(build, level, [weight], dtype),), (operand,))


def branchwise_rms(fused: FusedNode) -> Body:
    """BranchwiseRMSNorm: branches over the root of the mean of their squares, times factors, in float32 as the kernel has it.

    Raises:
        Refused: The length of a branch, or the type, is not known.
    """
    build, x, scale = fused.build, fused.operand("X"), fused.given("scale")
    dims, dtype, count = fused.dims(x), build.facts.dtype(x), fused.attribute("num_branches", 0)
    size = sizes.exact_quotient(dims[-1], count or 1)
    if size is None or dtype is None:
        raise Refused("not-decomposed", "the length of a branch, or the type, is not known", fused.node.name)
    grouped = build.cast(build.reshape(x, [*dims[:-1], count, size]) if count else x, _FLOAT)
    level = over_root(build, grouped, _FLOAT, [len(fused.dims(grouped)) - 1], fused.attribute("epsilon", _EPSILON))
    if scale is not None:
        given, branches = fused.dims(scale), fused.dims(grouped)[-2]
        if given not in {(size,), (branches, size), (branches * size,)}:
            raise Refused("malformed", f"factors of shape {list(given)} for {branches} branches of {size}", fused.node.name)
        factors = build.cast(scale, _FLOAT)
        if fused.dims(scale) != (size,):
            factors = build.reshape(factors, fused.dims(grouped)[-2:])
        level = build.elementwise("Mul", [level, factors], _FLOAT)
    return Body((build.cast(build.reshape(level, dims), dtype),), (x,))


def group(fused: FusedNode) -> Body:
    """GroupNormalization: InstanceNormalization of groups, and a factor and a summand for each channel.

    Raises:
        Refused: It is computed in another type than float32, or its factors are one for each group, as before opset 21.
    """
    build, operand, dtype = fused.build, fused.operand("X"), fused.dtype()
    _check_type(fused)
    dims, weights = fused.dims(operand), [fused.operand("scale"), fused.operand("bias")]
    groups: int = fused.attribute("num_groups", 0)
    channels = dims[1]
    each = [build.facts.dims(value) for value in weights]
    if not isinstance(channels, int) or not groups or channels % groups or each != [(channels,), (channels,)]:
        message = f"{fused.node.op_type} with factors that are not one for each channel cannot be decomposed"
        raise Refused("not-decomposed", message, fused.node.name)
    wide = build.cast(operand, _FLOAT)
    split = build.reshape(wide, [dims[0], groups, math.prod(dims[2:], start=channels // groups)])
    plain = [build.constant(np.full(groups, number, np.float32)) for number in (1.0, 0.0)]
    epsilon = {"epsilon": fused.attribute("epsilon", _EPSILON)}
    inner = build.node("InstanceNormalization", [split, *plain], epsilon, dims=build.facts.dims(split), dtype=_FLOAT)
    level = build.cast(build.reshape(inner, dims), dtype)
    own = [build.reshape(value, [channels, *([1] * (len(dims) - 2))]) for value in weights]
    return Body((_weighted(build, level, own, dtype),), (operand,))


def _total(fused: FusedNode) -> ir.Value:
    """The sum that is normalized."""
    total, *others = [fused.operand("input"), *fused.all_given("skip", "bias")]
    dims = fused.dims(total)
    for item in others:
        total = fused.build.node("Add", [total, item], dims=dims, dtype=fused.dtype())
    return total


def _with_sum(fused: FusedNode, result: ir.Value, total: ir.Value) -> Body:
    """The result and, after statistics, the sum."""
    return Body((result, None, None, total), tuple(fused.all_given("input", "skip")))


def _weighted(build: Builder, level: ir.Value, weights: Sequence[ir.Value], dtype: ir.DataType) -> ir.Value:
    """A value times the first weight, plus the second if there is one."""
    for op, weight in zip(("Mul", "Add"), weights, strict=False):
        level = build.elementwise(op, [level, weight], dtype)
    return level


def _check_type(fused: FusedNode) -> None:
    if fused.attribute("stash_type", int(_FLOAT)) != _FLOAT:
        raise Refused(
            "not-decomposed", f"{fused.node.op_type} that is not computed in float32 cannot be decomposed", fused.node.name
        )
