"""How low a mask can get: whether it can forbid a key at all, and whether with -inf.

Interval arithmetic over the operators that masks are made of. Values computed from activations and weights count as ordinary
numbers; what a user feeds may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_array, constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.spec import Floor, Mask, Select, Term, Times, Total

Interval = tuple[float, float]

_ANY: Interval = (-math.inf, math.inf)
_ORDINARY: Interval = (-900.0, 900.0)
"""What activations and weights lie in: the scores that they are added to are no larger."""
_UNIT: Interval = (0.0, 1.0)
_MOVING = (
    *("Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile", "Slice"),
    *("Gather", "GatherElements", "GatherND", "Split", "Cast", "CastLike"),
)
_DEEPEST = 64


class Bounds:
    """Intervals of mask values, remembered."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[ir.Value, Interval] = {}

    def lowest(self, mask: Mask | None) -> float:
        """The lowest value that the mask can add to a score."""
        return 0.0 if mask is None else self._mask(mask)[0]

    def of(self, value: ir.Value, depth: int = 0) -> Interval:
        """The interval that all elements of `value` lie in."""
        known = self._known.get(value)
        if known is None:
            known = self._value(value, depth)
            self._known[value] = known
        return known

    def _mask(self, mask: Mask) -> Interval:
        if isinstance(mask, Term):
            return self.of(mask.laid.value)
        if isinstance(mask, Total):
            left, right = self._mask(mask.left), self._mask(mask.right)
            return _add(left, (-right[1], -right[0]) if mask.negative else right)
        if isinstance(mask, Times):
            inner = self._mask(mask.mask)
            if isinstance(mask.factor, float):
                return _multiply(inner, (mask.factor, mask.factor))
            return _ANY if math.isinf(inner[0]) else _ORDINARY
        if isinstance(mask, Select):
            inner = (0.0, 0.0) if mask.mask is None else self._mask(mask.mask)
            return min(inner[0], mask.fill), max(inner[1], mask.fill)
        assert isinstance(mask, Floor)
        inner = self._mask(mask.mask)
        return max(inner[0], mask.low), max(inner[1], mask.low)

    def _value(self, value: ir.Value, depth: int) -> Interval:
        if self._facts.dtype(value) == ir.DataType.BOOL:
            return _UNIT
        if constant_tensor(value) is not None:
            return _constant(value)
        node = value.producer()
        if node is None or depth > _DEEPEST:
            return _ANY
        return self._computed(node, depth + 1) if is_standard(node) else _ORDINARY

    def _computed(self, node: ir.Node, depth: int) -> Interval:
        op = node.op_type
        if op == "ConstantOfShape":
            fill = attribute(node, "value")
            number = 0.0 if fill is None else float(fill.numpy().flat[0])
            return number, number
        if op in _UNBOUNDED:
            return _ANY
        read = _READ.get(op)
        if read is None:
            return _ORDINARY
        inputs = [item for item in node.inputs if item is not None]
        return _COMBINED[op](*(self.of(inputs[index], depth) for index in read if index < len(inputs)))


def _constant(value: ir.Value) -> Interval:
    array = constant_array(value, limit=1 << 24)
    if array is None or array.size == 0:
        return _ORDINARY
    array = np.asarray(array, np.float64)
    return float(array.min()), float(array.max())


def _union(*parts: Interval) -> Interval:
    return min(part[0] for part in parts), max(part[1] for part in parts)


def _add(left: Interval, right: Interval) -> Interval:
    return _rounded(left[0] + right[0], -math.inf), _rounded(left[1] + right[1], math.inf)


def _multiply(left: Interval, right: Interval) -> Interval:
    products = [a * b if a and b else 0.0 for a in left for b in right]
    return _rounded(min(products), -math.inf), _rounded(max(products), math.inf)


def _rounded(number: float, overflow: float) -> float:
    """A number past float32 is infinite there."""
    return overflow if abs(number) > 3.5e38 or math.isnan(number) else number


def _negative(part: Interval) -> Interval:
    return -part[1], -part[0]


def _subtract(left: Interval, right: Interval) -> Interval:
    return _add(left, _negative(right))


def _with_zero(part: Interval) -> Interval:
    return _union(part, (0.0, 0.0))


def _maximum(*parts: Interval) -> Interval:
    return max(part[0] for part in parts), max(part[1] for part in parts)


def _minimum(*parts: Interval) -> Interval:
    return min(part[0] for part in parts), min(part[1] for part in parts)


_UNBOUNDED = frozenset(["Div", "Log", "Reciprocal"])
_COMBINED: dict[str, Callable[..., Interval]] = {
    **dict.fromkeys(_MOVING, _union),
    "Add": _add,
    "Concat": _union,
    "Max": _maximum,
    "Min": _minimum,
    "Mul": _multiply,
    "Neg": _negative,
    "Pad": _with_zero,
    "ScatterElements": _union,
    "ScatterND": _union,
    "Sub": _subtract,
    "Trilu": _with_zero,
    "Where": _union,
}
_READ: dict[str, Sequence[int]] = {
    **dict.fromkeys([*_MOVING, "Neg", "Pad", "Trilu"], (0,)),
    **dict.fromkeys(["Add", "Mul", "Sub"], (0, 1)),
    **dict.fromkeys(["Concat", "Max", "Min"], range(64)),
    **dict.fromkeys(["ScatterElements", "ScatterND"], (0, 2)),
    "Where": (1, 2),
}
"""Which inputs of an operator decide."""
