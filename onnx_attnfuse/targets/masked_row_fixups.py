"""Rows of operands and results of a fused operator: filled with a number, or multiplied by a scale, by head if it differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import Axes4, ScaleValue
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array


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
