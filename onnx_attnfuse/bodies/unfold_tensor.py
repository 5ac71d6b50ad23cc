"""UnfoldTensor: pieces of an axis, each a step after the one before."""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.reasons import Refused


def body(fused: FusedNode) -> Body:
    """Pieces of the last axis that follow each other as rows that are cut, others looked up.

    Raises:
        Refused: Pieces are looked up along an axis whose length is unknown.
    """
    build, x = fused.build, fused.operand("input")
    dims = fused.dims(x)
    size, step = fused.attribute("size"), fused.attribute("step", 1)
    axis: int = fused.attribute("dim", -1) % len(dims)
    length, count = dims[axis], sizes.exact_quotient(dims[-1], step)
    if axis == len(dims) - 1 and size <= step and count is not None:
        rows = build.reshape(x, [*dims[:-1], count, step])
        return Body((build.slice(rows, len(dims), 0, size),), (x,))
    if not isinstance(length, int):
        why = "pieces overlap, are of an axis in the middle, or leave something at its end"
        raise Refused("not-decomposed", why, fused.node.name)
    if length < size:
        raise Refused("malformed", f"no pieces of {size} from an axis of {length}", fused.node.name)
    starts = range(0, length - size + 1, step)
    places = np.asarray([[start + item for item in range(size)] for start in starts], np.int64)
    found = (*dims[:axis], len(starts), size, *dims[axis + 1 :])
    pieces = build.node("Gather", [x, build.constant(places)], {"axis": axis}, dims=found, dtype=build.facts.dtype(x))
    order = [item for item in range(len(found)) if item != axis + 1]
    return Body((build.transpose(pieces, [*order, axis + 1]),), (x,))
