"""com.microsoft.Attention: self-attention together with the projections of its queries, keys and values, as one operator.

Three products become one, and the biases of the projections come along. The weights are merged into one (channels, columns of
queries, keys and values); they are rearranged by nodes first, so that the judge sees every step, and become one constant when all
sites are done (`graph.folding`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.kernels.operators.attention import INFO
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding, refuse_device
from onnx_attnfuse.targets.bias import full_bias
from onnx_attnfuse.targets.fully_masked_rows import read_rows
from onnx_attnfuse.targets.layout import operator, replacing
from onnx_attnfuse.targets.mask_encoding import encodings, read_padding, refuse_scores, shown
from onnx_attnfuse.targets.projections import Projections, in_order, joined, read_projections

__all__ = ["ALONE", "INFO", "emit", "encodings", "refuse"]

ALONE: bool = True


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can."""
    del meaning
    refused = refuse_device(INFO.key, spec.dtype, context.device) or refuse_scores(spec, INFO.name) or _refuse_operands(spec)
    if refused is not None:
        return refused
    if spec.scale_values or spec.scale <= 0:
        return Reason("scale-at-run-time", "Attention takes a scale that is a number above 0, not computed at run time")
    try:
        read_projections(spec, context.builder.facts)
    except Refused as found:
        return found.reason
    return None


def _refuse_operands(spec: AttentionSpec) -> Reason | None:
    """The reason why the operator cannot compute something between the projections and the scores; None if it can."""
    if spec.cache is not None:
        return Reason("cached", f"keys and values are appended to earlier ones, and {INFO.name} projects all of them itself")
    if spec.sink is not None:
        return Reason("sink", f"{INFO.name} has no place for a sink among the scores")
    if any(source.rotary is not None for operand in spec.operands() for source in operand):
        return Reason("rotated", f"queries or keys are rotated after they are projected, and {INFO.name} projects them itself")
    return None


def emit(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
    """Builds the operator for `spec` beside its nodes.

    Raises:
        Refused: A part of the meaning cannot be expressed exactly.
    """
    assert spec.dtype is not None
    builder = context.builder
    projections = read_projections(spec, builder.facts)
    axes = spec.axes
    rows = read_rows(spec, meaning, encoding, context)
    if rows.zero_query is not None:
        raise Refused("levelled-rows", "rows without a key get the mean of the values, which takes queries that can be set to 0")
    query, key, _ = projections.operands
    operand = arrange(builder, projections.input, (axes.b, axes.i, query.channels))
    weights, biases = _merged(builder, projections, spec)
    inputs: dict[str, ir.Value] = {"input": operand, "weights": weights, "bias": biases}
    if rows.bias is not None:
        known = supported(INFO.key, context.device.provider)
        inputs["attention_bias"] = full_bias(builder, axes, rows.bias, broadcasts=known.broadcasts_bias)
    elif encoding.mask in {"lengths", "ranges"}:
        padding = read_padding(spec, meaning, context)
        inputs["mask_index"] = padding.lengths() if encoding.mask == "lengths" else padding.ranges()
    attributes: dict[str, object] = {"num_heads": axes.num_heads, "scale": spec.scale * query.factor * key.factor}
    if encoding.causal:
        attributes["unidirectional"] = 1
    if length(axes.h) != length(axes.v):
        attributes["qkv_hidden_sizes"] = [_width(columns) for columns in _columns(spec)]
    fused = operator(builder, spec, INFO, inputs, attributes)
    chosen = [Source(IndexedValue(item.weight.value, (item.columns,)), item.factor) for item in projections.operands]
    targets = [(columns,) for columns in _columns(spec)]
    emitted = replacing(builder, fused, spec, rows, chosen, targets, shown(encoding, rows.bias, "mask_index"))
    return dataclasses.replace(
        emitted, operands=(projections.input.value, *projections.constants), needless=tuple(projections.values)
    )


def _width(columns: Axis) -> int:
    """How many columns of a weight there are.

    Raises:
        Refused: It is computed at run time.
    """
    size = length(columns)
    if not isinstance(size, int):
        raise Refused("unknown-head-size", "the head size is computed at run time, and the weights are put side by side by it")
    return size


def _columns(spec: AttentionSpec) -> tuple[Axis, Axis, Axis]:
    axes = spec.axes
    return (*axes.n, *axes.h), (*axes.n, *axes.h), (*axes.n, *axes.v)


def _merged(builder: Builder, projections: Projections, spec: AttentionSpec) -> tuple[ir.Value, ir.Value]:
    """The weights side by side, and the biases one after the other: zeros where there is none, as the CPU kernel wants one."""
    assert spec.dtype is not None
    operands, columns = projections.operands, _columns(spec)
    total = sum(map(_width, columns))
    weight = in_order([operand.weight for operand in operands], columns, 2)
    if weight is None:
        parts = [
            operand.arranged(builder, operand.weight, (operand.channels, target))
            for operand, target in zip(operands, columns, strict=True)
        ]
        weight = joined(builder, parts, 1)
    bias = in_order([operand.bias for operand in operands], columns, 1)
    if all(operand.bias is None for operand in operands):
        bias = builder.constant(np.zeros(total, spec.dtype.numpy()), "attnfuse/no_bias")
    if bias is None:
        numbers = [
            builder.constant(np.zeros(_width(target), spec.dtype.numpy()))
            if operand.bias is None
            else operand.arranged(builder, operand.bias, (target,))
            for operand, target in zip(operands, columns, strict=True)
        ]
        bias = joined(builder, numbers, 0)
    return weight, bias
