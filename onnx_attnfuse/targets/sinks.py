"""A sink for operators that know none: a key of zeros whose bias is the sink, and a value of zeros."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, leaves, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import Axes4
from onnx_attnfuse.graph.build import Builder


def with_zeros(builder: Builder, value: ir.Value, axis: int) -> ir.Value:
    """`value` with zeros after its last position along an axis."""
    dims, dtype = builder.facts.dims(value), builder.facts.dtype(value)
    assert dims is not None
    one = [1 if index == axis else dim for index, dim in enumerate(dims)]
    zeros = builder.expand(builder.scalar(0.0, dtype), one, [True] * len(one))
    return builder.node("Concat", [value, zeros], {"axis": axis})


def with_sink(builder: Builder, bias: ir.Value | None, sink: IndexedValue, axes: Axes4, dtype: ir.DataType) -> ir.Value:
    """A bias of shape (b or 1, n or 1, s, t), or none, with the sink after its last column."""
    sink = sink.refined()
    present = {leaf for axis in sink.axes for leaf in axis}
    layout: Axes = (*(axis if present & set(leaves(axis)) else () for axis in (axes.b, axes.n, axes.i)), ())
    column = builder.cast(arrange(builder, sink, layout), dtype)
    dims = None if bias is None else builder.facts.dims(bias)
    batch = length(axes.b) if layout[0] or (dims is not None and dims[0] != 1) else 1
    rows, columns = length(axes.i), length(axes.j)
    whole = [batch, length(axes.n), rows]
    if bias is None:
        bias = builder.scalar(0.0, dtype)
    bias = builder.expand(bias, [*whole, columns], [True] * 4)
    column = builder.expand(column, [*whole, 1], [True, True, True, False])
    return builder.node("Concat", [bias, column], {"axis": 3})
