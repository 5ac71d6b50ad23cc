"""UnfoldTensor, spelled out."""

from __future__ import annotations

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.decompose.site import Answer, Site


def spelled(site: Site) -> Answer:
    """Pieces of the last axis that follow each other, as rows that are cut.

    Raises:
        Refused: Pieces overlap, are of another axis, or leave something at its end.
    """
    build, x = site.build, site.operand("input")
    dims = site.dims(x)
    size, step, axis = site.attribute("size"), site.attribute("step", 1), site.attribute("dim", -1)
    count = sizes.exact_quotient(dims[-1], step)
    if axis % len(dims) != len(dims) - 1 or size > step or count is None:
        why = "pieces overlap, are of an axis in the middle, or leave something at its end"
        raise Refused("not-spelled", why, site.node.name)
    rows = build.reshape(x, [*dims[:-1], count, step])
    return Answer((build.slice(rows, len(dims), 0, size),), (x,))
