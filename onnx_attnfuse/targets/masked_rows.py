"""Rows of a mask that have a key, at run time, what is assumed of them, and fix-ups of masked rows of operands and results.

Rows of operands and results are filled with a number, or multiplied by a scale, by head if it differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec, Axes4, ScaleValue
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array
from onnx_attnfuse.graph.rules.reading import softmax_axis
from onnx_attnfuse.graph.thresholds import LEAST_EXPONENT
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.bias import bias_emitter


@dataclasses.dataclass(frozen=True)
class Refill:
    """Rows that become `number` where `test` is `where`."""

    test: IndexedValue
    where: bool
    number: float | Array = 0.0
    """A number, or one for each of n·channels."""
    keeps_nan: bool = False
    """Rows of NaN stay NaN."""


def apply_rows(builder: Builder, value: ir.Value, channels: Axis, refill: Refill, axes: Axes4) -> ir.Value:
    """`value` of shape (b, s, n·channels) with the number of `refill` in its rows."""
    number = refill.number

    def fill(value: ir.Value, test: ir.Value) -> ir.Value:
        if not isinstance(number, np.ndarray):
            return filled(builder, value, test, builder.scalar(number, builder.facts.dtype(value)), refill)
        size = length(channels) if len(builder.facts.dims(value) or ()) == 4 else number.size
        filling = builder.constant(number.reshape(-1, size) if isinstance(size, int) else number)
        return filled(builder, value, test, filling, refill)

    return by_rows(builder, value, channels, refill.test, axes, fill)


def filled(builder: Builder, value: ir.Value, test: ir.Value, filling: ir.Value, refill: Refill) -> ir.Value:
    """`value` with `filling`, the number of `refill`, where its test decides.

    A product with 0 keeps NaN, and Where does not.
    """
    dtype = builder.facts.dtype(value)
    if not refill.keeps_nan or dtype is None:
        return builder.elementwise("Where", [test, *([filling, value] if refill.where else [value, filling])])
    other = builder.elementwise("Not", [test])
    kept, dropped = (test, other) if not refill.where else (other, test)
    value = builder.elementwise("Mul", [value, builder.cast(kept, dtype)])
    if not np.any(refill.number):
        return value
    return builder.elementwise("Add", [value, builder.elementwise("Mul", [builder.cast(dropped, dtype), filling])])


def scale_rows(builder: Builder, value: ir.Value, channels: Axis, scale: ScaleValue, axes: Axes4) -> ir.Value:
    """`value` of shape (b, s, n·channels) times a scale that is no plain number."""

    def multiply(value: ir.Value, factor: ir.Value) -> ir.Value:
        dtype = builder.facts.dtype(value)
        factor = factor if dtype is None else builder.cast(factor, dtype)
        return builder.elementwise("Div" if scale.divide else "Mul", [value, factor])

    return by_rows(builder, value, channels, scale.indexed, axes, multiply)


def by_rows(
    builder: Builder,
    value: ir.Value,
    channels: Axis,
    operand: IndexedValue,
    axes: Axes4,
    combine: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Combines `value` of shape (b, s, n·channels) with an operand that has no channels, head by head if it differs by head."""
    operand = operand.refined()
    present = {leaf for axis in operand.axes for leaf in axis}
    batch, rows = (axis if present & set(axis) else () for axis in (axes.b, axes.i))
    dims = [length(axes.b), length(axes.i)]
    target: Axes = (batch, rows, ())
    if present & set(axes.n):
        value = builder.reshape(value, [*dims, length(axes.n), length(channels)])
        target = (batch, rows, axes.n, ())
    result = combine(value, operand.value if not operand.axes else arrange(builder, operand, target))
    builder.facts.copy(value, result)
    return builder.reshape(result, [*dims, length((*axes.n, *channels))])


def has_key(compact: IndexedValue, bound: float, context: BuildContext) -> IndexedValue:
    """Rows in which some mask value is above `bound`, (b or 1, n or 1, s or 1, 1).

    Where a condition chooses these values, it is asked: a position bias with heads is many times as large. Else values are
    compared first and reduced after: on a GPU the maximum of a row of -inf may come out as the lowest number. A finite number is
    above -inf rather than no less than the lowest number, which is -inf itself where a provider computes in float16.
    """
    builder, seen = context.builder, chosen_above(compact, bound, context)
    if seen is None:
        wide = builder.cast(compact.value, ir.DataType.FLOAT)
        seen = IndexedValue(_above(wide, bound, context), compact.axes)
    tests = builder.holds_along(seen.value, [3], by=context.device.provider.any_by)
    return IndexedValue(tests, (*seen.axes[:3], ()))


def _above(value: ir.Value, bound: float, context: BuildContext) -> ir.Value:
    """Where a value is above `bound`, or NaN: that row is to come out as NaN."""
    builder, sides = context.builder, [value, context.builder.scalar(bound, ir.DataType.FLOAT)]
    if all(map(math.isfinite, context.bounds.of(value))):
        return builder.elementwise("Greater", sides)
    return builder.elementwise("Not", [builder.elementwise("LessOrEqual", sides)])


def no_key(compact: IndexedValue, bound: float, context: BuildContext) -> IndexedValue:
    """Rows in which no mask value is above `bound`, (b or 1, n or 1, s or 1, 1)."""
    seen = has_key(compact, bound, context)
    return IndexedValue(context.builder.elementwise("Not", [seen.value]), seen.axes)


def level_rows(compact: IndexedValue, highest: float, context: BuildContext) -> IndexedValue:
    """Rows without a number above `highest`, but with a finite one."""
    if math.isfinite(context.bounds.of(compact.value)[0]):
        return no_key(compact, highest, context)
    tests = [has_key(compact, -math.inf, context), no_key(compact, highest, context)]
    fully_masked = context.builder.elementwise("And", [test.value for test in tests])
    return IndexedValue(fully_masked, tuple(one or other for one, other in zip(tests[0].axes, tests[1].axes, strict=True)))


def chosen_above(compact: IndexedValue, bound: float, context: BuildContext) -> IndexedValue | None:
    """The condition of a Where that gives numbers above `bound` where it holds, and none where it does not."""
    builder, node = context.builder, compact.value.producer()
    if node is None or node.op_type != "Where":
        return None
    condition, kept, fill = node.inputs
    if condition is None or kept is None or fill is None:
        return None
    chooses = aligned(condition, compact.axes, builder.facts)
    if chooses is None or len(chooses.axes) != len(compact.axes):
        return None
    spans = [context.bounds.of(value) for value in (kept, fill)]
    if spans[0][0] > bound >= spans[1][1]:
        return chooses
    if spans[1][0] > bound >= spans[0][1]:
        return IndexedValue(builder.elementwise("Not", [condition]), chooses.axes)
    return None


def chosen_in(compact: IndexedValue, seen: IndexedValue, rows: IndexedValue, builder: Builder) -> IndexedValue:
    """A bias that a Where chooses, with what it chooses where `seen` holds in certain rows too; so it is written once."""
    node = compact.value.producer()
    assert node is not None
    condition, kept, fill = node.inputs
    assert kept is not None
    assert fill is not None
    either = builder.elementwise("Or", [seen.value, rows.value])
    chosen = [kept, fill] if condition is seen.value else [fill, kept]
    return IndexedValue(builder.elementwise("Where", [either, *chosen]), compact.axes)


def at_zero(compact: IndexedValue, fully_masked: ir.Value, builder: Builder) -> IndexedValue:
    """A bias that is 0 in certain rows."""
    dtype = builder.facts.dtype(compact.value)
    zero = builder.scalar(0.0, dtype)
    return IndexedValue(builder.elementwise("Where", [fully_masked, zero, compact.value]), compact.axes)


def raised_in(bias: IndexedValue, fully_masked: ir.Value, builder: Builder) -> IndexedValue:
    """A bias whose largest number is 0 in certain rows, which softmax does not see."""
    raised = builder.elementwise("Sub", [bias.value, builder.reduce("ReduceMax", bias.value, [3])])
    return IndexedValue(builder.elementwise("Where", [fully_masked, raised, bias.value]), bias.axes)


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
    rank = builder.facts.rank(scores)
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
