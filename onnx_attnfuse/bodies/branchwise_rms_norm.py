"""BranchwiseRMSNorm, decomposed."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.bodies.core import over_root
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.reasons import Refused

_WIDE = ir.DataType.FLOAT


def body(fused: FusedNode) -> Body:
    """Branches over the root of the mean of their squares, times factors, in float32 as the kernel computes it.

    Raises:
        Refused: The length of a branch, or the type, is not known.
    """
    build, x, scale = fused.build, fused.operand("X"), fused.given("scale")
    dims, dtype, count = fused.dims(x), build.facts.dtype(x), fused.attribute("num_branches", 0)
    size = sizes.exact_quotient(dims[-1], count or 1)
    if size is None or dtype is None:
        raise Refused("not-decomposed", "the length of a branch, or the type, is not known", fused.node.name)
    grouped = build.cast(build.reshape(x, [*dims[:-1], count, size]) if count else x, _WIDE)
    level = over_root(build, grouped, _WIDE, [len(fused.dims(grouped)) - 1], fused.attribute("epsilon", 1e-5))
    if scale is not None:
        given, branches = fused.dims(scale), fused.dims(grouped)[-2]
        if given not in {(size,), (branches, size), (branches * size,)}:
            raise Refused("malformed", f"factors of shape {list(given)} for {branches} branches of {size}", fused.node.name)
        factors = build.cast(scale, _WIDE)
        if fused.dims(scale) != (size,):
            factors = build.reshape(factors, fused.dims(grouped)[-2:])
        level = build.elementwise("Mul", [level, factors], _WIDE)
    return Body((build.cast(build.reshape(level, dims), dtype),), (x,))
