"""BiasSplitGelu, decomposed."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.bodies.fused_node import Body, FusedNode

_WIDE = ir.DataType.FLOAT


def body(fused: FusedNode) -> Body:
    """The left half of a sum with a bias times the Gelu of the right one, in float32 as the kernel computes it.

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    build, x, bias = fused.build, fused.operand("X"), fused.operand("bias")
    dtype = build.facts.dtype(x)
    total = build.cast(build.elementwise("Add", [x, bias], dtype), _WIDE)
    width = fused.number(fused.dims(x)[-1], "the width of the operand")
    left, right = build.slice(total, 2, 0, width // 2), build.slice(total, 2, width // 2, width)
    scaled = build.elementwise("Mul", [right, build.scalar(math.sqrt(0.5), _WIDE)], _WIDE)
    curve = build.elementwise("Add", [build.elementwise("Erf", [scaled], _WIDE), build.scalar(1.0, _WIDE)], _WIDE)
    halved = build.elementwise("Mul", [right, build.scalar(0.5, _WIDE)], _WIDE)
    gelu = build.elementwise("Mul", [halved, curve], _WIDE)
    result = build.elementwise("Mul", [left, gelu], _WIDE)
    return Body((result if dtype is None else build.cast(result, dtype),), (x, bias))
