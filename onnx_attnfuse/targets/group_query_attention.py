"""com.microsoft.GroupQueryAttention: causal attention with a cache, also within a window, capped, of grouped heads.

It reads lengths, not masks: padding is not passed, only batches without any are its own. Its kernels read grouped heads and the
cache as they lie and spare the scores outside of a window, which no bias does. It always writes a cache, also where nobody reads
it: without one it pays before Hopper only, with many scores.

Where its cache is one buffer it may be given a mask with a bias too. The buffer holds real tokens only, those that padding is
between next to each other. So the bias of the source gets its columns in the order in which the buffer has keys, and its rows in
that in which new tokens go to the operator.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, leaves, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import elements_of, value_of
from onnx_attnfuse.attention.masks.predicates import Causal, Window
from onnx_attnfuse.attention.spec import AttentionSpec, Rotary
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.thresholds import NO_EXPONENTIAL, ORDINARY
from onnx_attnfuse.graph.uses import is_fed
from onnx_attnfuse.kernels.operators import rotary_embedding
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding, refuse_device
from onnx_attnfuse.targets.bias import bias_emitter, full_bias
from onnx_attnfuse.targets.fully_masked_rows import Rows
from onnx_attnfuse.targets.layout import Operands, grouped, operator, refuse_cache, replacing, shared_heads
from onnx_attnfuse.targets.mask_encoding import is_padding
from onnx_attnfuse.targets.masked_rows import Refill
from onnx_attnfuse.targets.operand_products import undivided
from onnx_attnfuse.targets.rotary import factors_of, long_tables

_LEAVES_NOTHING = NO_EXPONENTIAL - 4 * ORDINARY
"""From here down a fill leaves no weight beside an ordinary score with an ordinary bias."""
_ROWS, _COLUMNS = 2, 3
"""Axes of a bias (b, n, s, t)."""


@dataclasses.dataclass(frozen=True)
class Places:
    """For each place of an operator's rows and columns that of the source; None: they are in the source's order."""

    rows: ir.Value | None = None
    """(b, s) int64."""
    columns: ir.Value | None = None
    """(b, past + s) int64."""


def refuse_bias(spec: AttentionSpec, meaning: Meaning, context: BuildContext, *, is_buffered: bool) -> Reason | None:
    """Why the bias of an attention cannot be passed beside lengths, or None if it can."""
    if not is_buffered:
        return Reason("mask-form", "GroupQueryAttention is given a bias only where past and present are one buffer")
    if not supported(INFO.key, context.device.provider).bias_beside_lengths:
        return Reason(
            "mask-form", f"GroupQueryAttention is not known to take a bias together with lengths on {context.device.ep}"
        )
    if spec.unshifted:
        return Reason("unshifted-exponentials", "no maximum is subtracted from scores with a bias before exponentials are taken")
    read = [value_of(item) for bias in meaning.biases for item in elements_of(bias)]
    fed = [value.name for value in read if _is_fed(value, context)]
    if fed:
        return Reason("mask-form", f"'{fed[0]}', a bias that a caller feeds, may mask all keys of a row")
    if not context.builder.facts.assumed.bounded_scores:
        return Reason(
            "mask-form", "a bias may be so low that it masks all keys of a row, as scores are not assumed to be ordinary"
        )
    if max(meaning.fills, default=-math.inf) > _LEAVES_NOTHING:
        return Reason("mask-form", f"masked scores are {max(meaning.fills):g} and keep a weight where a bias is as low")
    return meaning.nan


def _is_fed(value: ir.Value, context: BuildContext) -> bool:
    dtype = context.builder.facts.dtype(value)
    return is_fed(value) and (dtype is None or dtype.is_floating_point())


def buffered_bias(spec: AttentionSpec, meaning: Meaning, context: BuildContext, places: Places) -> ir.Value:
    """The mask of an attention as a bias (b or 1, n or 1, s, past + s) of finite numbers in the order of a buffer.

    Raises:
        Refused: It is of a wider type than the operator, and would lose something.
    """
    assert spec.dtype is not None
    builder, compact = context.builder, bias_emitter(spec, meaning, context).compact(spec.mask)
    if context.bounds.lowest(spec.mask) == -math.inf:  # a row of padding would be NaN, and what later layers cache of it
        lowest = builder.scalar(-largest(spec.dtype), spec.dtype)
        value = builder.elementwise("Max", [compact.value, lowest])
        compact = dataclasses.replace(compact, value=value)
    value, batch = full_bias(builder, spec.axes, compact), length(spec.axes.b)
    for order, axis in ((places.columns, _COLUMNS), (places.rows, _ROWS)):
        value = value if order is None else _reordered(builder, value, order, axis, batch)
    return value


def _reordered(builder: Builder, value: ir.Value, order: ir.Value, axis: int, batch: Dim) -> ir.Value:
    """The rows or columns of a bias at the places that `order` has for each entry."""
    dims = dims_of(builder, value)
    value = builder.expand(value, [batch, *dims[1:]], [dims[0] != batch, False, False, False])
    rest = [place for place in (1, _ROWS, _COLUMNS) if place != axis]
    perm = [0, axis, *rest]
    turned = builder.transpose(value, perm)
    at = builder.reshape(order, [*dims_of(builder, order), 1])
    found = builder.node("GatherND", [turned, at], {"batch_dims": 1})
    return builder.transpose(found, [perm.index(place) for place in range(len(perm))])


ALONE: bool = False
_EIGHT = 8
"""The divisor of sizes."""
_AS_IT_IS = (0, 0, -1)
"""A Reshape to this keeps ONNX Runtime from folding three MatMul and two RotaryEmbedding into the operator: it would take their
caches for those of all positions, where they are those of the new ones, and read a cache's shape also where there is none. It
folds float16 only."""


@dataclasses.dataclass(frozen=True)
class Evicting:
    """Inputs of the operator where its buffer keeps no more than a window, so that padding may not enter it."""

    last: ir.Value
    """How many tokens each entry has so far, less one, (b) int32."""
    counts: ir.Value
    """How many of its new ones are tokens, (b) int32."""
    written: ir.Value | None
    """The rows that the operator writes, (b, s, 1); None: all. The others hold what was in memory before, and become 0."""


@dataclasses.dataclass(frozen=True)
class Buffered:
    """Inputs of the operator where past and present are one buffer."""

    last: ir.Value
    """The place of the last key in each entry, (b) int32."""
    total: ir.Value
    """How many positions there are, a scalar int32."""
    rows: Dim
    """The number of positions as a size that a table is to have."""
    is_rearranged: bool = False
    """New tokens are brought into another order in each entry."""
    places: Places = Places()
    """The order of a bias."""
    counts: ir.Value | None = None
    """How many rows are new in each entry, (b) int32; None: on top of cached ones several are taken for one entry only."""
    rotates: bool = True
    """The operator may rotate queries and keys itself."""
    evicting: Evicting | None = None
    """What it takes instead where its buffer keeps no more than a window; None: the buffer keeps all positions."""
    holds_new: tuple[ir.Value, ir.Value] | None = None
    """The buffer where it holds the new keys and values already; None: the operator appends them."""


def refuse(spec: AttentionSpec, meaning: Meaning, context: BuildContext, *, is_buffered: bool = False) -> Reason | None:
    """Why this operator cannot compute `spec`, where its past and present are one buffer or not, or None if it can."""
    unsupported = refuse_device(INFO.key, spec.dtype, context.device)
    if unsupported is not None:
        return unsupported
    axes = spec.axes
    size = length(axes.h)
    if size != length(axes.v) or not isinstance(size, int) or size % _EIGHT:
        return Reason("head-size", "GroupQueryAttention needs equal head sizes, a multiple of 8")
    if spec.scale <= 0:
        return Reason("scale-not-positive", f"GroupQueryAttention takes no scale of {spec.scale:g}")
    new = axes.i if spec.cache is None else spec.cache.new_axis
    if length(new) != length(axes.i) or (spec.cache is None and length(axes.i) != length(axes.j)):
        return Reason("not-square", "GroupQueryAttention is for self-attention, of as many new keys as queries")
    refusal = None if spec.cache is None else refuse_cache(spec, shared_heads(spec))
    if refusal is not None:
        return refusal
    if spec.cache is not None and not is_buffered and any(item.value.producer() is not None for item in spec.cache.past):
        return Reason(
            "computed-cache", "ONNX Runtime may write the longer cache over an earlier one that is no input of the graph"
        )
    if not _is_causal(spec, meaning):
        return Reason("not-causal", "GroupQueryAttention is for attention to the row's own position and those before it")
    rest = [item for item in meaning.predicates if not isinstance(item, (Causal, Window))]
    if window_of(spec, meaning) is None or (rest and not is_padding(rest, spec)):
        return Reason("mask-form", "keys are left out by something other than a causal triangle, a window and padding")
    if meaning.biases and (reason := refuse_bias(spec, meaning, context, is_buffered=is_buffered)) is not None:
        return reason
    if spec.sink is not None and not {leaf for axis in spec.sink.axes for leaf in leaves(axis)} <= set(axes.n):
        return Reason("sink-differs", "GroupQueryAttention takes one sink for each head, and here it differs by row")
    if any(rule.condition is not None for rule in spec.row_rules):
        return Reason("weights-zeroed", "the weights are set to 0 after the softmax")
    return None


def encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """Without a mask, for batches without padding where there may be some; with a bias if there is one.

    Several new positions on top of cached ones are taken for one batch entry only.
    """
    windowed = window_of(spec, meaning) != -1
    padded = any(not isinstance(item, (Causal, Window)) for item in meaning.predicates)
    one = 1 in {length(spec.axes.b), length(spec.axes.i)}
    return (
        MaskEncoding(
            "bias" if meaning.biases else "none",
            causal=True,
            when="unpadded" if padded else "always",
            windowed=windowed,
            cached=spec.cache is not None,
            single=spec.cache is not None and not one,
        ),
    )


def emit(
    spec: AttentionSpec,
    meaning: Meaning,
    context: BuildContext,
    encoding: MaskEncoding,
    *,
    buffered: Buffered | None = None,
) -> Emitted:
    """Builds the operator for `spec` beside its nodes.

    Args:
        spec: The attention.
        meaning: The meaning of its mask.
        context: The builder and its facts.
        encoding: How the mask is passed.
        buffered: Its lengths where past and present are one buffer; else they follow from the lengths of the keys.

    Raises:
        Refused: An operand cannot be brought into its layout.
    """
    assert spec.dtype is not None
    builder, axes = context.builder, spec.axes
    each = context.device.provider.rotates_each_token
    absorbs = functools.partial(absorbs_rotary, batch=axes.b, each=each, in_order=buffered is None or not buffered.is_rearranged)
    holding = None if buffered is None else buffered.holds_new
    inside = holding is None and (buffered is None or buffered.rotates)
    operands = grouped(builder, spec, Rows(None), cached=encoding.cached, absorbs=absorbs if inside else None)
    last, total = _lengths(builder, length(axes.b), length(axes.j)) if buffered is None else (buffered.last, buffered.total)
    window = window_of(spec, meaning)
    assert window is not None
    attributes: dict[str, Any] = {
        "num_heads": axes.num_heads,
        "kv_num_heads": length(operands.kv_heads),
        "scale": operands.scale,
        "local_window_size": window,
    }
    inputs = _handed_over(operands, spec, context) if holding is None else _query_alone(operands, spec, builder)
    inputs |= {"seqlens_k": last, "total_sequence_length": total}
    inputs["past_key"], inputs["past_value"] = holding or operands.past
    if meaning.biases and buffered is not None:
        inputs["attention_bias"] = buffered_bias(spec, meaning, context, buffered.places)
    if buffered is not None:
        inputs["query_seqlens"] = buffered.counts
    evicting = None if buffered is None else buffered.evicting
    if evicting is not None:
        inputs |= {"seqlens_k": evicting.last, "query_seqlens": evicting.counts}
        attributes["sliding_window_cache"] = 1
    if spec.softcap is not None:
        attributes["softcap"] = spec.softcap
    if operands.rotary is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(operands.rotary.interleaved)}
        least = length(axes.j) if buffered is None else buffered.rows
        cos, sin, positions = long_tables(builder, operands.rotary, axes.b, axes.i, least, spec.dtype)
        inputs |= {"cos_cache": cos, "sin_cache": sin, "position_ids": positions}
    if spec.sink is not None:
        heads = arrange(builder, spec.sink.refined(), (axes.n,))
        inputs["head_sink"] = builder.cast(heads, spec.dtype)
    fused = operator(builder, spec, INFO, inputs, attributes, outputs=3 if holding is None else 1)
    words = ["causal"] if window == -1 else ["causal", f"local_window_size {window}"]
    words += ["shared buffer"] if buffered is not None else []
    words += ["no more than a window"] if evicting is not None else []
    words += ["no new keys"] if holding is not None else []
    words += ["attention_bias"] if meaning.biases else []
    words += ["do_rotary"] if operands.rotary is not None else []
    words += ["packed qkv"] if inputs.get("key") is None and buffered is None else []
    form = f"{INFO.name} {', '.join(words)}"
    gives = encoding.cached and holding is None
    rows = Rows(None)
    if evicting is not None and evicting.written is not None:
        test = IndexedValue(evicting.written, (axes.b, axes.i, ()))
        rows = Rows(None, refills=(Refill(test, where=False),))
    return replacing(builder, fused, spec, rows, operands.chosen, operands.targets, form, cached=gives)


def _query_alone(operands: Operands, spec: AttentionSpec, builder: Builder) -> dict[str, ir.Value | None]:
    """Queries with no keys and values; nodes built for those are removed where nothing else reads them."""
    query, *rest = operands.values
    width, batch = length((*operands.kv_heads, *spec.axes.h)), length(spec.axes.b)
    assert isinstance(width, int)
    assert spec.dtype is not None
    nothing = builder.cast(builder.constant(np.zeros((1, 0, width), np.float32)), spec.dtype)
    empty = builder.expand(nothing, [batch, 0, width], [True, False, False])
    sweep(rest)
    return {"query": query, "key": empty, "value": empty}


def _handed_over(operands: Operands, spec: AttentionSpec, context: BuildContext) -> dict[str, ir.Value | None]:
    """Queries, keys and values by the names of inputs; in one where they are pieces of one value and that pays."""
    builder, (query, key, value) = context.builder, operands.values
    pays = "packed-operands" in context.device.provider.pays
    packed = undivided(operands, spec, builder) if pays else None
    if packed is not None:
        return {"query": packed}
    if spec.dtype == ir.DataType.FLOAT16 and any(_is_rotated(item) for item in (query, key)):
        value = builder.node("Reshape", [value, builder.constant(_AS_IT_IS)], dims=builder.facts.dims(value), dtype=spec.dtype)
    return {"query": query, "key": key, "value": value}


def takes_in_norms(context: BuildContext) -> bool:
    """Whether it pays that the operator normalizes queries and keys itself."""
    return "norms-inside" in context.device.provider.pays


def merges_projections(context: BuildContext) -> bool:
    """Whether it pays to make one product of those of queries, keys and values, for one tensor to pass."""
    return "merged-projections" in context.device.provider.pays


def absorbs_rotary(rotary: Rotary, *, batch: Axis, each: bool, in_order: bool) -> bool:
    """Whether the operator can rotate queries and keys itself.

    Args:
        rotary: How they are rotated.
        batch: The axis of the batch.
        each: The provider rotates each token by its own position; else those of a prompt by positions that count up.
        in_order: Tokens are in the order of the source.
    """
    if rotary.width // 2 % _EIGHT:
        return False
    factors = factors_of(rotary)
    return each or (in_order and (not factors if rotary.positions is not None else factors.isdisjoint(leaves(batch))))


def _is_rotated(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == rotary_embedding.INFO.name


def _is_causal(spec: AttentionSpec, meaning: Meaning) -> bool:
    """Whether the last row sees up to the last key, each row before it one key less; one row sees all without saying so."""
    triangles = [item for item in meaning.predicates if isinstance(item, Causal)]
    if not triangles:
        return length(spec.axes.i) == 1
    return len(triangles) == 1 and triangles[0].offset == length(spec.axes.j) - length(spec.axes.i)


def window_of(spec: AttentionSpec, meaning: Meaning) -> int | None:
    """How many keys a row sees, itself counted; -1: all before it; None: that is not known."""
    windows = [item for item in meaning.predicates if isinstance(item, Window)]
    if not windows:
        return -1
    reach = windows[0].reach + (length(spec.axes.j) - length(spec.axes.i))
    return reach + 1 if len(windows) == 1 and isinstance(reach, int) and reach >= 0 else None


def _lengths(builder: Builder, batch: Dim, columns: Dim) -> tuple[ir.Value, ir.Value]:
    """The place of the last key in every entry, (b) int32, and how many keys there are, a scalar int32."""
    total = builder.cast(builder.reshape(builder.shape([columns]), []), ir.DataType.INT32)
    last = builder.elementwise("Sub", [total, builder.constant(np.asarray(1, np.int32))])
    return builder.expand(builder.reshape(last, [1]), [batch], [True]), total
