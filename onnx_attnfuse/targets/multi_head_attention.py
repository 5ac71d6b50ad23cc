"""com.microsoft.MultiHeadAttention: any attention without soft cap; masks as a bias, as lengths, or by the causal attribute."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec, Axes4
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.kernels.execution_provider import Paying
from onnx_attnfuse.kernels.operators.multi_head_attention import INFO
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding, refuse_device
from onnx_attnfuse.targets.bias import full_bias
from onnx_attnfuse.targets.blocks import block_encodings, emit_blocks
from onnx_attnfuse.targets.fully_masked_rows import Rows, read_rows
from onnx_attnfuse.targets.layout import (
    Operands,
    arranged,
    cheapest,
    operator,
    prepared_query,
    price,
    replacing,
    scale_of,
    with_sink,
    with_zeros,
)
from onnx_attnfuse.targets.mask_encoding import encodings as whole_encodings
from onnx_attnfuse.targets.mask_encoding import read_padding, refuse_scores, shown
from onnx_attnfuse.targets.masked_rows import Refill, apply_rows
from onnx_attnfuse.targets.operand_products import Projected, own_products, read_projection

__all__ = ["ALONE", "INFO", "emit", "encodings", "refuse"]

ALONE: bool = False


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can."""
    del meaning
    return refuse_device(INFO.key, spec.dtype, context.device) or refuse_scores(spec, INFO.name)


def encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """Every way to pass the mask, and for which batches each is exact; a window in blocks besides."""
    return (*whole_encodings(spec, meaning), *block_encodings(spec, meaning))


def emit(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
    """Builds the operator for `spec` beside its nodes.

    Raises:
        Refused: A part of the meaning cannot be expressed exactly.
    """
    if encoding.band is not None:
        return emit_blocks(spec, meaning, context, encoding)
    assert spec.dtype is not None
    builder, axes = context.builder, spec.axes
    rows = read_rows(spec, meaning, encoding, context)
    known = supported(INFO.key, context.device.provider)
    given = _operands(spec, rows, context, flat=context.flat or encoding.causal or not known.keys_by_head)
    query, key, value = given.values
    if spec.sink is not None:
        key, value = with_zeros(builder, key), with_zeros(builder, value)
    bias = None if rows.bias is None else full_bias(builder, axes, rows.bias, broadcasts=known.broadcasts_bias)
    bias = bias if spec.sink is None else with_sink(builder, bias, spec.sink, axes, spec.dtype)
    inputs = {"query": query, "key": key, "value": value, "bias": given.bias, "attention_bias": bias}
    if bias is None and encoding.mask in {"lengths", "ranges"}:
        padding = read_padding(spec, meaning, context)
        inputs["key_padding_mask"] = padding.lengths() if encoding.mask == "lengths" else padding.ranges()
    fused = operator(
        builder,
        spec,
        INFO,
        inputs,
        {"num_heads": axes.num_heads, "scale": abs(given.scale) or 1.0, **({"unidirectional": 1} if encoding.causal else {})},
    )
    form = (
        shown(encoding, rows.bias, "key_padding_mask") if spec.sink is None else "attention_bias b n s t, a column for the sink"
    )
    emitted = replacing(builder, fused, spec, rows, given.chosen, given.targets, form)
    return dataclasses.replace(emitted, operands=given.frontier, needless=given.needless)


def _operands(spec: AttentionSpec, rows: Rows, context: BuildContext, *, flat: bool) -> Operands:
    """The operands of `spec`: from products of their own, or without the biases of their projections, or as they are.

    Raises:
        Refused: One of them cannot be brought into the layout of the operator.
    """
    assert spec.dtype is not None
    builder, axes = context.builder, spec.axes
    joined: tuple[Axes, Axes, Axes] = (
        (axes.b, axes.i, (*axes.n, *axes.h)),
        (axes.b, axes.j, (*axes.n, *axes.h)),
        (axes.b, axes.j, (*axes.n, *axes.v)),
    )
    is_plain = spec.sink is None and not spec.scale_values
    pays = context.device.provider.pays if is_plain else frozenset[Paying]()
    own = own_products(spec, builder, joined) if "own-products" in pays else None
    if own is not None and (scale := scale_of(spec, own.chosen)) > 0:
        values = _levelled(own.projected, rows, axes, builder)
        return Operands(values, own.chosen, joined, scale, bias=own.projected.bias, frontier=own.frontier, needless=own.needless)
    targets = joined if flat or spec.sink is not None else (joined[0], *_key_value_targets(spec, joined))
    chosen = [cheapest(operand, target) for operand, target in zip(spec.operands(), targets, strict=True)]
    scale = scale_of(spec, chosen)
    is_bias_taken = "projection-bias" in pays and targets == joined and scale > 0
    projected = read_projection(builder, chosen, targets, spec.dtype) if is_bias_taken else None
    if projected is not None:
        values = _levelled(projected, rows, axes, builder)
        return Operands(values, chosen, targets, scale, bias=projected.bias, frontier=projected.operands)
    query = prepared_query(builder, chosen[0], targets[0], spec, rows, scale)
    key, value = (arranged(builder, item, target, spec.dtype) for item, target in zip(chosen[1:], targets[1:], strict=True))
    return Operands((query, key, value), chosen, targets, scale)


def _levelled(projected: Projected, rows: Rows, axes: Axes4, builder: Builder) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The operands, queries the opposite of the bias in rows whose scores must be equal, so that they are zero together."""
    query, key, value = projected.operands
    if rows.zero_query is None:
        return query, key, value
    refill = Refill(rows.zero_query, True, -projected.query_bias, rows.keeps_nan)
    return apply_rows(builder, query, axes.h, refill, axes), key, value


def _key_value_targets(spec: AttentionSpec, joined: tuple[Axes, Axes, Axes]) -> tuple[Axes, Axes]:
    """Keys and values as (b, t, n·h), or as (b, n, t, h) where that is how they lie and both have the same head size."""
    axes = spec.axes
    split: tuple[Axes, Axes] = (axes.b, axes.n, axes.j, axes.h), (axes.b, axes.n, axes.j, axes.v)
    if length(axes.h) != length(axes.v):
        return joined[1:]
    prices = [
        sum(
            price(operand, cheapest(operand, target), target)
            for operand, target in zip((spec.key, spec.value), pair, strict=True)
        )
        for pair in (joined[1:], split)
    ]
    return split if prices[1] < prices[0] else joined[1:]
