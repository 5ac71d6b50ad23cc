"""Running sums of what is the same at every place: positions that are counted as `cumsum(ones)`, or marks that are never set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.expression import Expression, Linear, combine, constant, index, scaled
from onnx_attnfuse.attention.masks.reshape_index import At
from onnx_attnfuse.graph.constants import attribute

if TYPE_CHECKING:
    from onnx_attnfuse.attention.masks.index_reader import Reader

_COUNTED = frozenset([ir.DataType.INT64, ir.DataType.INT32])


def running_sum(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    """An element of a CumSum of integers that are one number at every place of the axis; None where they are not."""
    dims, own = reader.input_dims(node, 0, at), reader.facts.number(node.inputs[1]) if node.inputs[1] is not None else None
    if dims is None or own is None or reader.facts.dtype(node.outputs[0]) not in _COUNTED:
        return None
    axis = int(own) % len(at)
    anywhere = index(Factor(dims[axis])) if dims[axis] != 1 else constant(0)
    summand = reader.input(node, 0, (*at[:axis], anywhere, *at[axis + 1 :]), depth)
    place = at[axis]
    if not isinstance(summand, Linear) or summand.terms or not isinstance(place, Linear):
        return None
    before = combine(constant(dims[axis] - 1), place, -1) if attribute(node, "reverse", 0) else place
    count = before if attribute(node, "exclusive", 0) else combine(before, constant(1))
    return scaled(count, summand.offset)
