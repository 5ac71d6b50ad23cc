"""Rounding to a grid: a QuantizeLinear and the DequantizeLinear after it, as quantisers put them around operators, read as one.

    pair = read_pair(node, facts)       # node: the DequantizeLinear
    pair.before, pair.after             # a tensor of floats, and the same rounded to multiples of a scale

A pair whose halves have other scales, zero points or axes is no rounding, as it moves the rounded values.
"""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import Array, attribute, constant_array, constant_tensor, given
from onnx_attnfuse.graph.facts_view import Known
from onnx_attnfuse.graph.ops import is_contrib, is_standard
from onnx_attnfuse.reasons import Reason

_DYNAMIC = "DynamicQuantizeLinear"
ROUNDS = frozenset(["QuantizeLinear", "DequantizeLinear", _DYNAMIC])
"""Operators that are half of a rounding."""


@dataclasses.dataclass(frozen=True)
class QdqPair:
    """A QuantizeLinear, or DynamicQuantizeLinear, and a DequantizeLinear that takes the numbers back to the same grid."""

    quantize: ir.Node
    dequantize: ir.Node
    before: ir.Value
    """The floats that are rounded."""
    after: ir.Value
    """The rounded floats, of the same type and shape."""
    dtype: ir.DataType | None
    """The type of the integers, or small floats, between the two."""
    axis: int | None
    """The axis along which scales differ, counted from the first; None: one scale for the tensor."""
    block_size: int = 0
    """So many neighbours along the axis share a scale; 0: the axis has a scale for each place."""

    @property
    def nodes(self) -> tuple[ir.Node, ir.Node]:
        """Both nodes, in the order in which they run."""
        return self.quantize, self.dequantize

    @property
    def is_computed(self) -> bool:
        """Whether the scale is computed at run time."""
        return self.quantize.op_type == _DYNAMIC or constant_tensor(self.dequantize.inputs[1]) is None


def quantizes(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Whether a node rounds floats to integers, or to small floats, by a scale."""
    return _is(node, "QuantizeLinear") or is_standard(node, _DYNAMIC)


def dequantizes(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Whether a node multiplies rounded values by a scale."""
    return _is(node, "DequantizeLinear")


def _is(node: ir.Node | None, op: str) -> bool:
    return is_standard(node, op) or is_contrib(node, op)


def read_pair(node: ir.Node | None, facts: Known) -> QdqPair | None:
    """The pair that ends in `node`; None where there is none, or its halves are not of one grid."""
    if node is None or (halves := _halves(node)) is None or _difference(*halves, facts):
        return None
    quantize, before = halves[0], halves[0].inputs[0]
    assert before is not None
    axis, block = _axis(node, facts)
    return QdqPair(quantize, node, before, node.outputs[0], facts.dtype(quantize.outputs[0]), axis, block)


def why_no_pair(node: ir.Node, facts: Known) -> Reason | None:
    """Why the half of a pair that `node` ends or begins is none of a rounding; None where it is no half of a pair."""
    users = (user for user, place in node.outputs[0].uses() if place == 0) if quantizes(node) else (node,)
    for user in users:
        halves = _halves(user)
        difference = "" if halves is None else _difference(*halves, facts)
        if halves is not None and difference:
            before = halves[0].inputs[0]
            problem = f"'{before.name if before else ''}' is quantized and dequantized with {difference}"
            return Reason("not-one-grid", f"{problem}, so its values move instead of being rounded", user.name)
    return None


def _halves(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The quantization that a DequantizeLinear takes the result of, and itself."""
    if not dequantizes(node) or len(node.inputs) < 2 or node.inputs[0] is None:
        return None
    quantize = node.inputs[0].producer()
    if quantize is None or not quantizes(quantize) or node.inputs[0] is not quantize.outputs[0] or quantize.inputs[0] is None:
        return None
    return quantize, node


def _difference(quantize: ir.Node, dequantize: ir.Node, facts: Known) -> str:
    """In what the halves of a pair are not of one grid; empty where they are."""
    dynamic = quantize.op_type == _DYNAMIC
    if dynamic:
        scales, points = (quantize.outputs[1], dequantize.inputs[1]), (quantize.outputs[2], given(dequantize, 2))
    else:
        scales = quantize.inputs[1], dequantize.inputs[1]
        points = given(quantize, 2), given(dequantize, 2)
    if not _same(*scales):
        return "different scales"
    known = constant_array(scales[0])
    if known is not None and not (np.isfinite(known.astype(np.float64)) & (known.astype(np.float64) > 0)).all():
        return "a scale that is no positive number"
    if points[0] is not points[1] and not _same_points(*points):
        return "different zero points"
    if not dynamic and _axis(quantize, facts) != _axis(dequantize, facts):
        return "scales along different axes"
    types = facts.dtype(dequantize.outputs[0]), facts.dtype(quantize.inputs[0])
    return "" if None in types or types[0] == types[1] else "different element types"


def _same(left: ir.Value | None, right: ir.Value | None) -> bool:
    """Whether two values are one, or equal constants."""
    if left is right:
        return left is not None
    first, second = constant_array(left), constant_array(right)
    if first is None or second is None or first.dtype != second.dtype:
        return False
    return (first.shape == second.shape or first.size == second.size == 1) and np.array_equal(first.ravel(), second.ravel())


def _same_points(left: ir.Value | None, right: ir.Value | None) -> bool:
    """Whether two zero points are equal, of which one that is left out is 0."""
    if left is not None and right is not None:
        return _same(left, right)
    given = constant_array(left if right is None else right)
    return given is not None and not given.astype(np.float32).any()


def _axis(node: ir.Node, facts: Known) -> tuple[int | None, int]:
    """The axis along which the scales of a node differ, and how many places share one."""
    given, dims = facts.dims(node.inputs[0]), facts.dims(node.inputs[1])
    block: int = attribute(node, "block_size", 0)
    if not block and (dims is None or all(dim == 1 for dim in dims)):
        return None, 0
    axis: int = attribute(node, "axis", 1)
    return (axis % len(given) if given else axis), block


def same_rounded(value: ir.Value | None, other: ir.Value, facts: Known) -> tuple[ir.Node, ...] | None:
    """The nodes that turn `value` into `other`, rounded to the same grid once more; none if it is the same value.

    Quantisers may give each reader of a tensor a pair of its own.

    Returns:
        None where it is another value.
    """
    if value is other:
        return ()
    if value is None:
        return None
    first, second = (read_pair(item.producer(), facts) for item in (value, other))
    if first is None or second is None or first.before is not second.before or not same_grid(first, second):
        return None
    return first.nodes if first.quantize is not second.quantize else (first.dequantize,)


def same_grid(one: QdqPair, other: QdqPair) -> bool:
    """Whether two pairs round to the same numbers."""
    if (one.dtype, one.axis, one.block_size) != (other.dtype, other.axis, other.block_size):
        return False
    points = given(one.dequantize, 2), given(other.dequantize, 2)
    return _same(one.dequantize.inputs[1], other.dequantize.inputs[1]) and (points[0] is points[1] or _same_points(*points))


_LEVELS: dict[ir.DataType, tuple[int, int]] = {
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-(1 << 15), (1 << 15) - 1),
    ir.DataType.UINT16: (0, (1 << 16) - 1),
}


def quantized_number(node: ir.Node, number: float | None, scale: float | None, point: float | None, facts: Known) -> float | None:
    """The integer that QuantizeLinear makes of a number, by one scale; None where that is not known."""
    levels = _LEVELS.get(facts.dtype(node.outputs[0]) or ir.DataType.UNDEFINED)
    if number is None or not scale or not np.isfinite(scale) or point is None or levels is None or np.isnan(number):
        return None
    with np.errstate(over="ignore"):
        quotient: Array = np.asarray(number, np.float32) / np.asarray(scale, np.float32)
        steps = float(np.rint(quotient))
    return min(max(steps + point, levels[0]), levels[1])


def dequantized_number(code: float | None, scale: float | None, point: float | None) -> float | None:
    """The number that DequantizeLinear makes of an integer, by one scale; None where that is not known."""
    if code is None or scale is None or point is None or not np.isfinite(scale):
        return None
    with np.errstate(over="ignore"):
        product: Array = np.asarray(code - point, np.float32) * np.asarray(scale, np.float32)
    return float(product)
