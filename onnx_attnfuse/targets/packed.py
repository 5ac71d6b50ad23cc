"""com.microsoft.PackedMultiHeadAttention: attention of every entry with itself, over tokens without padding.

It is never chosen where nobody asks for it: rows of the result that are padding become 0, where the source has something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, length
from onnx_attnfuse.attention.axes.rearrange import arrange, cost, einops
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import factors_of
from onnx_attnfuse.attention.masks.predicates import Padding
from onnx_attnfuse.attention.spec import AttentionSpec, Layouts, Source
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.kernels.operators.packed_multi_head_attention import INFO
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import BuildContext, refuse_device
from onnx_attnfuse.targets.bias import bias_emitter, full_bias
from onnx_attnfuse.targets.layout import scale_of, typed
from onnx_attnfuse.targets.mask_encoding import is_padding

NAME: str = INFO.option or INFO.key
"""The caller's choice."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the tokens of a packed batch come from."""

    offset: ir.Value
    """(b, s): the places of the tokens, then those of padding."""
    starts: ir.Value
    """(b + 1): where entries start."""


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why this operator cannot compute `spec`, or None if it can, by itself."""
    axes = spec.axes
    unsupported = refuse_device(INFO.key, spec.dtype, context.device)
    if unsupported is not None:
        return unsupported
    if spec.softcap is not None:
        return Reason("no-softcap", "PackedMultiHeadAttention cannot cap scores by tanh")
    if spec.sink is not None:
        return Reason("no-sink", "PackedMultiHeadAttention takes no scores except those of the keys")
    if spec.scale_values or spec.result_scales or spec.scale <= 0:
        return Reason("scaled-at-run-time", "PackedMultiHeadAttention takes one scale, which is a constant above 0")
    if spec.cache is not None:
        return Reason("cached", "keys and values are appended to earlier ones, which packed tokens cannot be")
    if length(axes.i) != length(axes.j):
        return Reason("cross-attention", "queries and keys are not proven to be of the same sequence")
    if meaning.nan is not None:
        return meaning.nan
    if meaning.is_trivial:
        return Reason("nothing-to-remove", "there is no padding mask, so there is no padding to remove")
    return _not_padding(spec, meaning, context)


def _not_padding(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why there is more in the mask than padding, or no padding to remove."""
    if not is_padding(meaning.predicates, spec):
        return Reason("not-padding-only", f"the mask is {meaning.kind}, and packed tokens only know padding")
    if not spec.axes.b or not spec.axes.i:
        return Reason("one-token", "there is one entry or one position, and so nothing to pack")
    paddings = [item.predicate for item in meaning.predicates if isinstance(item, Padding)]
    if not all(factors_of(item) & set(spec.axes.b) for item in paddings):
        return Reason("not-padding-only", "the mask forbids the same keys in every entry of the batch, which padding does not")
    if any(map(context.bounds.may_mask, meaning.biases)):
        return Reason("not-padding-only", "the bias of the scores may mask keys, too, and packed tokens only know padding")
    return None


@dataclasses.dataclass(frozen=True)
class PackedResult:
    """A packed attention."""

    node: ir.Node
    value: ir.Value
    """The result in packed form, its channels laid out as asked for."""
    scale: float
    layouts: Layouts


def choose(operand: Sequence[Source], batch: Axis, rows: Axis, channels: Axis) -> Source:
    """The source that costs least to bring into (b, s, n·h); of equals the one furthest up, so that views die."""
    target: Axes = (batch, rows, channels)
    return min(reversed(operand), key=lambda source: cost(source.indexed, target))


def attend(
    context: BuildContext,
    spec: AttentionSpec,
    meaning: Meaning,
    chosen: Sequence[Source],
    operands: Sequence[IndexedValue],
    packing: Packing,
    wanted: Axes,
) -> PackedResult:
    """Builds the operator.

    Args:
        context: The builder and its facts.
        spec: The attention.
        meaning: Its mask; where it adds something too, all of it is passed.
        chosen: The sources of query, key and value.
        operands: The same in packed form, their first axis the tokens.
        packing: Where the tokens come from.
        wanted: Layout of the channels of the result.
    """
    builder, axes = context.builder, spec.axes
    assert spec.dtype is not None
    tokens = operands[0].axes[0]
    targets: tuple[Axes, ...] = tuple((tokens, (*axes.n, *channels)) for channels in (axes.h, axes.h, axes.v))
    indexed = [IndexedValue(operand.value, (tokens, *operand.axes[1:])) for operand in operands]
    compact = bias_emitter(spec, meaning, context).compact(spec.mask) if spec.mask and meaning.biases else None
    added = None if compact is None else full_bias(builder, axes, compact)
    laid = [typed(builder, arrange(builder, item, target), spec.dtype) for item, target in zip(indexed, targets, strict=True)]
    inputs: dict[str, ir.Value | None] = dict(zip(("query", "key", "value"), laid, strict=True))
    inputs |= {"token_offset": packing.offset, "cumulative_sequence_length": packing.starts, "attention_bias": added}
    scale = scale_of(spec, chosen)
    fused = builder.node(
        INFO.name,
        INFO.arranged(inputs),
        {"num_heads": axes.num_heads, "scale": scale},
        domain=INFO.domain,
        dims=[length(tokens), length((*axes.n, *axes.v))],
        dtype=spec.dtype,
        hint=f"{spec.name}/{INFO.name}",
    )
    node = producer_of(fused)
    if chosen[2].factor != 1.0:
        fused = builder.elementwise("Mul", [fused, builder.scalar(chosen[2].factor, spec.dtype)], spec.dtype)
    result = IndexedValue(fused, targets[2])
    names = axes.names() | dict.fromkeys(tokens, "t")
    query, key, value = (einops(item, target, names) for item, target in zip(indexed, targets, strict=True))
    layouts = Layouts(query, key, value, einops(result, (tokens, *wanted), names))
    final = typed(builder, arrange(builder, result, (tokens, *wanted)), spec.output_dtype or spec.dtype)
    return PackedResult(node, final, scale, layouts)
