"""Whether the assumptions about every row of scores hold in a run, by its own numbers: by this a form is verified."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.match.softmax import softmax_axis
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.bias import bias_emitter
from onnx_attnfuse.targets.masked_row_predicates import no_key
from onnx_attnfuse.thresholds import LEAST_EXPONENT


def assumed_of_rows(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> ir.Value | None:
    """One truth value: every row is as is assumed; None where nothing is.

    Args:
        spec: An attention.
        meaning: Its mask.
        context: The builder and its facts; nodes are built after the attention of the source.
    """
    if spec.renormalized is not None:
        return _kept_weights_hold(spec, meaning, context)
    return _exponentials_hold(spec, context) if spec.unshifted and not spec.voided else None


def _exponentials_hold(spec: AttentionSpec, context: BuildContext) -> ir.Value | None:
    """The largest score of every row is not so far below the number subtracted from all that its exponential is lost."""
    builder = context.builder
    softmax = next((node for node in spec.nodes if node.op_type == "Softmax"), None)
    scores = None if softmax is None else softmax.inputs[0]
    axis = None if softmax is None else softmax_axis(softmax, builder.facts, builder.opset)
    rank = None if scores is None else builder.facts.rank(scores)
    if scores is None or axis is None or rank is None:
        return None
    top = builder.reduce("ReduceMax", builder.cast(scores, ir.DataType.FLOAT), [axis])
    lost = builder.elementwise("Less", [top, builder.scalar(LEAST_EXPONENT, ir.DataType.FLOAT)])
    some = builder.holds_along(lost, list(range(rank)), keep=False)
    return builder.elementwise("Not", [some])


def _kept_weights_hold(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> ir.Value:
    """Every row keeps no key, or weights of a sum as large as `kept-weights` says."""
    assert spec.renormalized is not None
    builder, axes = context.builder, spec.axes
    total = arrange(builder, spec.renormalized.total, (axes.b, axes.n, axes.i, ()))
    wide = builder.cast(total, ir.DataType.FLOAT)
    least = builder.scalar(spec.renormalized.least, ir.DataType.FLOAT)
    enough = builder.elementwise("GreaterOrEqual", [wide, least])
    empty = no_key(bias_emitter(spec, meaning, context).compact(spec.mask, "exact"), -math.inf, context)
    held = builder.elementwise("Or", [empty.value, enough])
    lost = builder.holds_along(builder.elementwise("Not", [held]), [0, 1, 2, 3], keep=False)
    return builder.elementwise("Not", [lost])
