"""MultiHeadAttention over blocks of rows, each with the strip of keys that its window reaches, where a mask has a window.

    query  (b, s, n·h)     → (b·blocks, w, n·h)      rows, the last block filled up
    key    (b, t, n·h)     → (b·blocks, n, k, h)     the k keys that w rows may see, moved to lie inside the sequence
    bias   (b, n, s, t)    → (b·blocks, n, w, k)     the mask at these rows and keys
    result (b·blocks, w, …) → (b, s, n·v)

Keys outside a strip are masked in all rows of its block, so they have no weight, unless a row has no key at all. Neither block
nor strip is longer than the sequence: sizes are computed at run time, and a sequence that gains nothing by blocks is one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.fully_masked import sees_a_key
from onnx_attnfuse.attention.masks.predicates import Causal, Window
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.thresholds import ABSORBS
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.kernels.operators.multi_head_attention import INFO
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding
from onnx_attnfuse.targets.bias import letters_of
from onnx_attnfuse.targets.fully_masked_rows import Rows, read_rows
from onnx_attnfuse.targets.layout import grouped, replacing
from onnx_attnfuse.targets.masked_rows import chosen_above
from onnx_attnfuse.targets.strips import Strips

_LEAST_BLOCK = 64
"""Rows of a block at least: the products of smaller ones take as long."""
_WIDEST = 512
"""The widest band that is computed in blocks: verification still runs sequences that are long enough for several."""
_SINCE = 12
"""The opset from which on Min and Max take integers."""


@dataclasses.dataclass(frozen=True)
class Band:
    """`i - back <= j <= i + ahead`, whatever else a mask forbids."""

    back: Dim
    width: int
    """`back + ahead`."""


def band_of(spec: AttentionSpec, meaning: Meaning) -> Band | None:
    """The narrowest band that all keys of a row lie in, of a width that is known; None if there is none."""
    if spec.causal or spec.cache is not None or spec.sink is not None or spec.unshifted or spec.renormalized is not None:
        return None
    triangles = [item.offset for item in meaning.predicates if isinstance(item, Causal)]
    windows = [item.reach for item in meaning.predicates if isinstance(item, Window)]
    bands = [(back, back + ahead) for back, ahead in itertools.product(windows, triangles)]
    known = [Band(back, width) for back, width in bands if isinstance(width, int) and 0 <= width <= _WIDEST]
    return min(known, key=lambda band: band.width, default=None)


def block_encodings(spec: AttentionSpec, meaning: Meaning) -> tuple[MaskEncoding, ...]:
    """A bias in blocks, where the mask has a window; keys and values are of one head size."""
    band, axes = band_of(spec, meaning), spec.axes
    same = length(axes.h) == length(axes.v) and isinstance(length(axes.h), int)
    return () if band is None or not same else (MaskEncoding("bias", band=band.width),)


def emit_blocks(spec: AttentionSpec, meaning: Meaning, context: BuildContext, encoding: MaskEncoding) -> Emitted:
    """Builds the operator over blocks for `spec`, beside its nodes.

    Raises:
        Refused: Rows without a key would be others, or an operand cannot be brought into the layout.
    """
    builder, axes, band = context.builder, spec.axes, band_of(spec, meaning)
    assert band is not None
    assert spec.dtype is not None
    if builder.opset < _SINCE:
        raise Refused("old-opset", f"blocks need opset {_SINCE}, and the model has {builder.opset}")
    rows = read_rows(spec, meaning, encoding, context)
    assert rows.bias is not None
    strips = Strips(builder, length(axes.b), (length(axes.i), length(axes.j)), _rows(band), (band.back, band.width))
    seen = None if sees_a_key(meaning, context.bounds) else _seeing(strips, rows, context)
    operands = grouped(builder, spec, rows)
    (query, key, value), shared = operands.values, length(operands.kv_heads)
    assert isinstance(shared, int)
    heads = axes.num_heads, axes.num_heads // shared
    inputs = {
        "query": strips.blocks(query),
        "key": strips.by_head(key, *heads, _channels(axes.h)),
        "value": strips.by_head(value, *heads, _channels(axes.v)),
        "attention_bias": strips.bias(rows.bias.value),
    }
    fused = builder.node(
        INFO.name,
        INFO.arranged(inputs),
        {"num_heads": axes.num_heads, "scale": abs(operands.scale) or 1.0},
        domain=INFO.domain,
        dims=[length(axes.b) * strips.count, strips.rows, length((*axes.n, *axes.v))],
        dtype=spec.dtype,
        hint=f"{spec.name}/{INFO.name}",
    )
    result = strips.whole(fused)
    if seen is not None:
        result = _levelled(builder, result, value, seen, spec, heads)
    form = f"attention_bias {letters_of(rows.bias)}, {_rows(band)} rows and {_rows(band) + band.width} keys at a time"
    emitted = replacing(builder, result, spec, rows, operands.chosen, operands.targets, form)
    return dataclasses.replace(emitted, node=producer_of(fused))


def _rows(band: Band) -> int:
    """How many rows a block of a long sequence has at most."""
    return max(_LEAST_BLOCK, (band.width + 1) // 2)


def _channels(axis: Axis) -> int:
    size = length(axis)
    assert isinstance(size, int)
    return size


def _seeing(strips: Strips, rows: Rows, context: BuildContext) -> ir.Value | None:
    """(b or 1, s, 1): rows that see a key; the others have the plain mean of all values. None where those are NaN.

    Raises:
        Refused: It is unknown which rows these are, or they have another result.
    """
    builder, bias = context.builder, rows.bias
    assert bias is not None
    seen, node = chosen_above(bias, context.bounds.masked_from, context), bias.value.producer()
    if rows.zero_query is not None or seen is None or node is None or seen.axes[1]:
        raise Refused("whole-window", "rows may see no key, and their result in blocks is unknown")
    numbers = [builder.facts.number(value) for value in node.inputs[1:] if value is not None]
    fill = min((number for number in numbers if number is not None), default=0.0)
    if fill == -math.inf:
        return None
    if fill > ABSORBS:
        raise Refused("whole-window", f"rows may see no key, and {fill:g} leaves something of their scores")
    some = builder.holds_along(strips.mask(seen.value), [1, 4], keep=False, by=context.device.provider.any_by)
    return strips.line(some)


def _levelled(
    builder: Builder, result: ir.Value, value: ir.Value, seen: ir.Value, spec: AttentionSpec, heads: tuple[int, int]
) -> ir.Value:
    """The result (b, s, n·v), in rows that see no key the mean of the values (b, t, n/group·v)."""
    (batch, keys, width), group = dims_of(builder, value), heads[1]
    count = builder.cast(builder.reshape(builder.shape([keys]), [1, 1, 1]), ir.DataType.FLOAT)
    share = builder.elementwise("Div", [builder.scalar(1.0, ir.DataType.FLOAT), count], ir.DataType.FLOAT)
    share = builder.expand(share, [1, 1, keys], [True, True, True])
    mean = builder.node("MatMul", [share, value], dims=[batch, 1, width], dtype=spec.dtype)  # a third of ReduceMean's time
    if group > 1:
        size = _channels(spec.axes.v)
        each = [batch, heads[0] // group, group, size]
        mean = builder.expand(builder.reshape(mean, [*each[:2], 1, size]), each, [False, False, True, False])
        mean = builder.reshape(mean, [batch, 1, width * group])
    return builder.elementwise("Where", [seen, result, mean], spec.dtype)
