"""com.microsoft.MultiHeadAttention: any attention without soft cap; masks as a bias, as lengths, or by the causal attribute."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec, Axes4
from onnx_attnfuse.kernels.operators.multi_head_attention import INFO
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding, refuse_device, taken, type_name
from onnx_attnfuse.targets.bias import BiasEmitter
from onnx_attnfuse.targets.fully_masked_rows import read_rows
from onnx_attnfuse.targets.layout import arranged, cheapest, operator, prepared_query, price, replacing
from onnx_attnfuse.targets.mask_encoding import encodings, refuse_scores, shown
from onnx_attnfuse.targets.padding import read_padding
from onnx_attnfuse.targets.projection_bias import read_projection
from onnx_attnfuse.targets.row_edits import Refill, apply_rows
from onnx_attnfuse.targets.sinks import with_sink, with_zeros

__all__ = ["ALONE", "INFO", "emit", "encodings", "refuse"]

ALONE: bool = False


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can."""
    del meaning
    otherwise = Reason("no-kernel-for-type", f"MultiHeadAttention has no kernel for {type_name(spec.dtype)}")
    return refuse_device(INFO.key, spec.dtype, context.device, otherwise) or refuse_scores(spec, INFO.name)


def emit(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding, *, flat: bool = False) -> Emitted:
    """Builds the operator for `spec` beside its nodes.

    Args:
        spec: The attention.
        meaning: Its mask, understood.
        context: What to build with.
        encoding: How to hand the mask over, one of `encodings`.
        flat: Do not take keys and values as (b, n, t, h).

    Raises:
        Refused: A part of the meaning cannot be expressed exactly.
    """
    assert spec.dtype is not None
    builder, axes = context.builder, spec.axes
    bias = BiasEmitter(builder, axes, spec.dtype)
    rows = read_rows(spec, meaning, encoding, bias, context)
    known = taken(INFO.key, context.device)
    flat = flat or encoding.causal or spec.sink is not None or not known.keys_by_head
    targets = ((axes.b, axes.i, (*axes.n, *axes.h)), *_key_value_targets(spec, axes, flat=flat))
    chosen = [cheapest(operand, target) for operand, target in zip(spec.operands(), targets, strict=True)]
    scale = spec.scale * chosen[0].factor * chosen[1].factor
    plain = spec.sink is None and scale != 0 and not spec.scale_values and len(targets[1]) == len(targets[0])
    pays = plain and "projection-bias" in context.device.provider.pays
    projected = read_projection(builder, chosen, targets, spec.dtype) if pays else None
    if projected is not None:
        query, key, value = projected.operands
        if rows.zero_query is not None:  # such a row and its bias are zero together
            query = apply_rows(builder, query, axes.h, Refill(rows.zero_query, True, -projected.query_bias), axes)
    else:
        query, key, value = (arranged(builder, item, target, spec.dtype) for item, target in zip(chosen, targets, strict=True))
        query = prepared_query(builder, query, spec, rows, scale, axes)
    inputs: dict[str, ir.Value] = {"query": query, "key": key, "value": value}
    if projected is not None:
        inputs["bias"] = projected.bias
    if spec.sink is not None:
        inputs |= {"key": with_zeros(builder, key, 1), "value": with_zeros(builder, value, 1)}
        full = None if rows.bias is None else bias.full(rows.bias, broadcasts=known.broadcasts_bias)
        inputs["attention_bias"] = with_sink(builder, full, spec.sink, axes, spec.dtype)
    elif rows.bias is not None:
        inputs["attention_bias"] = bias.full(rows.bias, broadcasts=known.broadcasts_bias)
    elif encoding.mask in {"lengths", "ranges"}:
        padding = read_padding(spec, meaning, context)
        inputs["key_padding_mask"] = padding.lengths() if encoding.mask == "lengths" else padding.ranges()
    fused = operator(
        builder,
        spec,
        INFO,
        inputs,
        {"num_heads": axes.num_heads, "scale": scale or 1.0, **({"unidirectional": 1} if encoding.causal else {})},
    )
    form = (
        shown(encoding, rows.bias, "key_padding_mask") if spec.sink is None else "attention_bias b n s t, a column for the sink"
    )
    emitted = replacing(builder, fused, spec, rows, chosen, targets, form)
    return emitted if projected is None else dataclasses.replace(emitted, operands=projected.operands)


def _key_value_targets(spec: AttentionSpec, axes: Axes4, *, flat: bool) -> tuple[Axes, Axes]:
    """Keys and values as (b, t, n·h), or as (b, n, t, h) where that is how they lie and both have the same head size."""
    joined: tuple[Axes, Axes] = (axes.b, axes.j, (*axes.n, *axes.h)), (axes.b, axes.j, (*axes.n, *axes.v))
    split: tuple[Axes, Axes] = (axes.b, axes.n, axes.j, axes.h), (axes.b, axes.n, axes.j, axes.v)
    if length(axes.h) != length(axes.v) or flat:
        return joined
    prices = [
        sum(
            price(operand, cheapest(operand, target), target)
            for operand, target in zip((spec.key, spec.value), pair, strict=True)
        )
        for pair in (joined, split)
    ]
    return split if prices[1] < prices[0] else joined
