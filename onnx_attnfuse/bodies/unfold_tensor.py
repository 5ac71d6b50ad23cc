"""UnfoldTensor, spelled out."""

from __future__ import annotations

from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.reasons import Refused


def body(fused: FusedNode) -> Body:
    """Pieces of the last axis that follow each other, as rows that are cut.

    Raises:
        Refused: Pieces overlap, are of another axis, or leave something at its end.
    """
    build, x = fused.build, fused.operand("input")
    dims = fused.dims(x)
    size, step, axis = fused.attribute("size"), fused.attribute("step", 1), fused.attribute("dim", -1)
    count = sizes.exact_quotient(dims[-1], step)
    if axis % len(dims) != len(dims) - 1 or size > step or count is None:
        why = "pieces overlap, are of an axis in the middle, or leave something at its end"
        raise Refused("not-spelled", why, fused.node.name)
    rows = build.reshape(x, [*dims[:-1], count, step])
    return Body((build.slice(rows, len(dims), 0, size),), (x,))
