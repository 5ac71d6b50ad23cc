"""A mask with a bias for an operator whose past and present are one buffer: passed as a bias in the buffer's order.

The buffer holds real tokens only, those that padding is between next to each other. So the bias of the source gets its columns in
the order in which the buffer has keys, and its rows in that in which new tokens go to the operator.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import elements_of, value_of
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.bias import bias_emitter
from onnx_attnfuse.thresholds import NO_EXPONENTIAL, ORDINARY

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
    return value.is_graph_input() and value.const_value is None and (dtype is None or dtype.is_floating_point())


def buffered_bias(spec: AttentionSpec, meaning: Meaning, context: BuildContext, places: Places) -> ir.Value:
    """The mask of an attention as a bias (b or 1, n or 1, s, past + s) of finite numbers in the order of a buffer.

    Raises:
        Refused: It is of a wider type than the operator, and would lose something.
    """
    assert spec.dtype is not None
    builder, emitter = context.builder, bias_emitter(spec, meaning, context)
    compact = emitter.compact(spec.mask)
    if context.bounds.lowest(spec.mask) == -math.inf:  # a row of padding would be NaN, and what later layers cache of it
        lowest = builder.scalar(-largest(spec.dtype), spec.dtype)
        value = builder.elementwise("Max", [compact.value, lowest])
        compact = dataclasses.replace(compact, value=value)
    value, batch = emitter.full(compact), length(spec.axes.b)
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
