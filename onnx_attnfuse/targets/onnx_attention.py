"""ai.onnx Attention: any attention of float operands, capped or not, also of grouped heads and with a cache; masks as a bias.

It takes keys and values with the heads they have and appends to a cache whatever the batch is: no other operator is exact for
every batch and as fast on one new position. Without a cache MultiHeadAttention is faster, but where few queries meet few keys.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.fully_masked import DISAGREEING, rows_disagree
from onnx_attnfuse.attention.masks.predicates import Causal
from onnx_attnfuse.attention.masks.seen_keys import sees_a_key
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.kernels.operators.onnx_attention import INFO
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding, refuse_device
from onnx_attnfuse.targets.bias import full_bias, letters_of
from onnx_attnfuse.targets.fully_masked_rows import read_rows
from onnx_attnfuse.targets.layout import grouped, operator, refuse_cache, replacing, shared_heads, with_sink, with_zeros
from onnx_attnfuse.targets.mask_encoding import is_padding

ALONE: bool = False


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can."""
    del meaning
    builder, axes = context.builder, spec.axes
    repeated = length(shared_heads(spec)) != length(axes.n) and length(axes.i) != length(axes.j)
    pays = spec.softcap is not None or spec.cache is not None or (repeated and "repeated-heads" in context.device.provider.pays)
    if builder.opset < INFO.since and not (pays or context.opset.asked):
        return Reason("old-opset", f"ai.onnx Attention needs opset {INFO.since}, and the model has {builder.opset}")
    unsupported = refuse_device(INFO.key, spec.dtype, context.device)
    if unsupported is not None:
        return unsupported
    if spec.scale <= 0:
        return Reason("scale-not-positive", f"ai.onnx Attention takes no scale of {spec.scale:g}")
    return context.opset.refuse(INFO.since)


def encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """How the mask is passed.

    The operator's triangle begins with the first new row and the first key, or with the first new key where there is a cache.
    """
    if spec.sink is not None:
        return (MaskEncoding("bias"),)
    cached = spec.cache is not None and not spec.causal and refuse_cache(spec, shared_heads(spec)) is None
    first = length(spec.cache.past_axis) if cached and spec.cache is not None else 0
    triangles = [item for item in meaning.predicates if isinstance(item, Causal)]
    rest = [item for item in meaning.predicates if item not in triangles]
    causal = len(triangles) == 1 and triangles[0].offset == first
    plain = not meaning.biases and (causal or not triangles)
    if plain and not rest:
        return (MaskEncoding("none", causal, cached=cached),)
    bias = MaskEncoding("bias", spec.causal, cached=cached)
    if cached and plain and is_padding(rest, spec):
        return MaskEncoding("none", causal, "unpadded", cached=True), bias
    return (bias,)


def emit(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
    """Builds the operator for `spec` beside its nodes, raising the opset if it has to.

    Raises:
        Refused: A part of the meaning cannot be expressed exactly.
    """
    assert spec.dtype is not None
    builder, axes = context.builder, spec.axes
    context.opset.raise_to(INFO.since)
    builder.opset = max(builder.opset, INFO.since)
    rows = read_rows(spec, meaning, encoding, context, zeroes=True)
    has_key = spec.sink is not None or sees_a_key(meaning, context.bounds)
    if rows.bias is not None and not has_key and rows_disagree(rows.bias, context.reader, context.bounds, builder.opset):
        raise Refused("kernels-disagree", DISAGREEING)
    operands = grouped(builder, spec, rows, cached=encoding.cached)
    if operands.scale <= 0:
        raise Refused("scale-not-positive", f"ai.onnx Attention takes no scale of {operands.scale:g}")
    known = supported(INFO.key, context.device.provider)
    mask = None if rows.bias is None else full_bias(builder, axes, rows.bias, broadcasts=known.broadcasts_bias)
    query, key, value = operands.values
    if spec.sink is not None:
        key, value = (with_zeros(builder, item) for item in (key, value))
        mask = with_sink(builder, mask, spec.sink, axes, spec.dtype)
    inputs: dict[str, ir.Value | None] = {"Q": query, "K": key, "V": value, "attn_mask": mask}
    inputs["past_key"], inputs["past_value"] = operands.past
    attributes = {
        "q_num_heads": axes.num_heads,
        "kv_num_heads": length(operands.kv_heads),
        "scale": operands.scale,
        "is_causal": int(encoding.causal),
    }
    fused = operator(
        builder,
        spec,
        INFO,
        inputs,
        attributes if spec.softcap is None else {**attributes, "softcap": spec.softcap},
        outputs=3 if encoding.cached else 1,
    )
    form = _shown(encoding, rows.bias) if spec.sink is None else "attn_mask b n s t, a column for the sink"
    return replacing(builder, fused, spec, rows, operands.chosen, operands.targets, form, cached=encoding.cached)


def _shown(encoding: MaskEncoding, bias: IndexedValue | None) -> str:
    """The form in which the mask is passed."""
    words = ["is_causal"] if encoding.causal else []
    if bias is not None:
        words.append(f"attn_mask {letters_of(bias)}")
    return " + ".join(words) or "none"
