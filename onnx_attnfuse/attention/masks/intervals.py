"""How low a mask can get: whether it can forbid a key at all, and whether with -inf.

Interval arithmetic over the operators that masks are made of. Values computed from activations and weights count as ordinary
numbers; inputs may be anything.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.mask_terms import bare, constant_of, value_of
from onnx_attnfuse.attention.masks.operators import branches, float_of
from onnx_attnfuse.attention.spec import Added, Floored, Gain, Mask, Replaced, Scaled
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph.constants import attribute, constant_array, constant_tensor, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, GATHERS, REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.thresholds import LARGEST_FLOAT16, MASKS, ORDINARY

Interval = tuple[float, float]

_Operand = TypeVar("_Operand")
_ANY: Interval = (-math.inf, math.inf)
_ORDINARY: Interval = (-ORDINARY, ORDINARY)
"""The interval of activations and weights: the scores that they are added to are no larger."""
_UNIT: Interval = (0.0, 1.0)
_SMALL = 100.0
"""A number up to this makes no mask of what is computed; 1e4 and more do."""
_MOVING = REARRANGES | REPEATS | SLICES | GATHERS | CASTS | {"CastLike"}
_EXTREMES = frozenset(["MaxPool", "ReduceMax", "ReduceMin"])
_MAX_EXPRESSION_DEPTH = 64
_OUTCOMES: Mapping[str, Callable[[float, float], float]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Max": max, "Min": min,
}  # fmt: skip
"""Operators on two numbers."""


class Bounds:
    """Intervals of mask values, remembered."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[ir.Value, Interval] = {}

    @property
    def masked_from(self) -> float:
        """From here down a number that is added to a score, or put in its place, masks it."""
        return self._facts.assumed.masked_from

    @property
    def level_rows(self) -> bool:
        """Whether scores of rows without a key are taken to be so small that the masking number absorbs them."""
        return "level-rows" in self._facts.assumed.names

    def may_mask(self, bias: Term) -> bool:
        """Whether something that is added to the scores may be so low that it masks a key.

        Numbers from -1000 down count also where they are not taken to mask: a row of nothing larger depends on the digits that
        they leave of its scores.
        """
        return not self.of_term(bias)[0] > MASKS  # NaN may be anything

    def lowest(self, mask: Mask) -> float:
        """The lowest value that the mask can add to a score."""
        bounds = (0.0, 0.0)
        for step in mask:
            match step:
                case Added(indexed, negative):
                    term = self.of(indexed.value)
                    bounds = added(bounds, _negative(term) if negative else term)
                case Scaled():
                    bounds = _multiply(bounds, self._factor(step))
                case Replaced(_, _, fill):
                    bounds = min(bounds[0], fill), max(bounds[1], fill)
                case Floored(low):
                    bounds = max(bounds[0], low), max(bounds[1], low)
        return bounds[0]

    def gain(self, gain: Gain) -> Interval:
        """The interval of the product of a gain's factors that are computed at run time."""
        bounds = (1.0, 1.0)
        for step in gain.values:
            bounds = _multiply(bounds, self._factor(step))
        return bounds

    def _factor(self, step: Scaled) -> Interval:
        if not isinstance(step.factor, IndexedValue):
            return step.factor, step.factor
        found = self.of(step.factor.value)
        return _divide((1.0, 1.0), found) if step.divide else found

    def of_term(self, part: Term) -> Interval:
        """The interval that a term lies in at every index; index arithmetic counts as ordinary numbers."""
        value, part = constant_of(part), bare(part)
        if value is not None:
            return _between(value, value)
        if part.op == "element":
            return self.of(value_of(part))
        if part.op == "ite":
            return _union(*map(self.of_term, branches(part)))
        if part.op != "apply":
            return _UNIT if part.sort == "Bool" else self._ordinary
        if part.data == "Complement":
            return _subtract((1.0, 1.0), self.of_term(part.args[0]))
        if self._is_computed(part):
            return _ORDINARY
        return self._combined(part.data, part.args, self.of_term)

    def _is_computed(self, part: Term) -> bool:
        """Whether a term is computed from activations, weights and small numbers alone, by whichever operators."""
        value, part = constant_of(part), bare(part)
        if value is not None:
            return abs(value) <= _SMALL
        if part.op == "element":
            return self.of_term(part) == _ORDINARY
        if part.data == "Div" and (divisor := constant_of(part.args[1])) is not None and abs(divisor) < 1:
            return False  # as large a factor as may be
        return part.op == "apply" and part.data not in {*_UNBOUNDED, "Log"} and all(map(self._is_computed, part.args))

    @property
    def _ordinary(self) -> Interval:
        return _ORDINARY if self._facts.assumed.bounded_scores else _ANY

    def of(self, value: ir.Value, depth: int = 0) -> Interval:
        """The interval that all elements of `value` lie in."""
        known = self._known.get(value)
        if known is None:
            known = self._value(value, depth)
            self._known[value] = known
        return known

    def _value(self, value: ir.Value, depth: int) -> Interval:
        if self._facts.dtype(value) == ir.DataType.BOOL:
            return _UNIT
        if constant_tensor(value) is not None:
            return _constant(value)
        node = value.producer()
        if node is None or depth > _MAX_EXPRESSION_DEPTH:
            return _ANY
        bounds = self._computed(node, depth + 1) if is_standard(node) else self._ordinary
        return _in_half(bounds) if self._facts.dtype(value) == ir.DataType.FLOAT16 else bounds

    def _computed(self, node: ir.Node, depth: int) -> Interval:
        op = node.op_type
        if op == "ConstantOfShape":
            fill = attribute(node, "value")
            number = 0.0 if fill is None else float(fill.numpy().flat[0])
            return _between(number, number)
        if attribute(node, "reduction", "none") != "none":
            return _ANY
        inputs = [item for item in node.inputs if item is not None]
        if op == "Clip":
            lifted = _maximum(self.of(inputs[0], depth), self._option(node, 1, "min", -math.inf))
            return _minimum(lifted, self._option(node, 2, "max", math.inf))
        if op == "Pad":
            return _union(self.of(inputs[0], depth), self._option(node, 2, "value", 0.0))
        return self._combined(op, inputs, lambda value: self.of(value, depth))

    def _combined(self, op: str, operands: Sequence[_Operand], of: Callable[[_Operand], Interval]) -> Interval:
        """The interval of a result, from those of the operands that decide."""
        if op not in _COMBINED:
            return _ANY if op in _UNBOUNDED else self._ordinary
        combine, places = _COMBINED[op]
        return combine(*(of(operands[place]) for place in places if place < len(operands)))

    def _option(self, node: ir.Node, place: int, name: str, default: float) -> Interval:
        """The interval of an argument that is an input in newer opsets and an attribute in older ones."""
        value = given(node, place)
        number = float(attribute(node, name, default))
        return _between(number, number) if value is None else self.of(value)


def _constant(value: ir.Value) -> Interval:
    array = constant_array(value, limit=1 << 24)
    if array is None or array.size == 0:
        return _ORDINARY
    return _between(float(np.min(array)), float(np.max(array)))


def _between(low: float, high: float) -> Interval:
    """The interval between two numbers; anything where one is NaN."""
    return _ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _in_half(bounds: Interval) -> Interval:
    """An interval with ends beyond float16 made infinite; numbers that are computed in float32 may still be finite."""
    low, high = bounds
    return (-math.inf if low < -LARGEST_FLOAT16 else low), (math.inf if high > LARGEST_FLOAT16 else high)


def _union(*parts: Interval) -> Interval:
    return min(part[0] for part in parts), max(part[1] for part in parts)


def outcomes(part: Term) -> frozenset[float]:
    """The numbers that a mask computed from constants may come to; elements read from elsewhere count as 0."""
    value = float_of(part)
    if value is not None:
        return frozenset([value])
    if part.op == "ite":
        return frozenset[float]().union(*map(outcomes, branches(part)))
    if part.data in _OUTCOMES and len(part.args) == 2:
        return frozenset(_OUTCOMES[part.data](*pair) for pair in itertools.product(*map(outcomes, part.args)))
    return frozenset([0.0])


def added(left: Interval, right: Interval) -> Interval:
    """The sum of two intervals; numbers beyond float32 are infinite."""
    return _rounded(left[0] + right[0], -math.inf), _rounded(left[1] + right[1], math.inf)


def _multiply(left: Interval, right: Interval) -> Interval:
    products = [a * b if a and b else 0.0 for a in left for b in right]
    return _rounded(min(products), -math.inf), _rounded(max(products), math.inf)


def _divide(left: Interval, right: Interval) -> Interval:
    """A quotient, unless the divisor may be 0."""
    if right[0] <= 0 <= right[1]:
        return _ANY
    return _multiply(left, (1 / right[1], 1 / right[0]))


def _rounded(number: float, unknown: float) -> float:
    """A number past float32 is infinite there; one that is none is `unknown`."""
    return unknown if math.isnan(number) else math.copysign(math.inf, number) if abs(number) > 3.5e38 else number


def _negative(part: Interval) -> Interval:
    return -part[1], -part[0]


def _subtract(left: Interval, right: Interval) -> Interval:
    return added(left, _negative(right))


def _absolute(part: Interval) -> Interval:
    return max(part[0], -part[1], 0.0), max(part[1], -part[0])


def _logarithm(part: Interval) -> Interval:
    """A logarithm, unless it is taken of what may be 0 or less."""
    return (math.log(part[0]), math.log(part[1]) if part[1] < math.inf else math.inf) if part[0] > 0 else _ANY


def _with_zero(part: Interval) -> Interval:
    return _union(part, (0.0, 0.0))


def _maximum(*parts: Interval) -> Interval:
    return max(part[0] for part in parts), max(part[1] for part in parts)


def _minimum(*parts: Interval) -> Interval:
    return min(part[0] for part in parts), min(part[1] for part in parts)


_UNBOUNDED = frozenset(["Reciprocal"])
_COMBINED: dict[str, tuple[Callable[..., Interval], Sequence[int]]] = {
    **dict.fromkeys(_MOVING | _EXTREMES, (_union, (0,))),
    **dict.fromkeys(["ScatterElements", "ScatterND"], (_union, (0, 2))),
    "Abs": (_absolute, (0,)),
    "Add": (added, (0, 1)),
    "Concat": (_union, range(64)),
    "Div": (_divide, (0, 1)),
    "Log": (_logarithm, (0,)),
    "Max": (_maximum, range(64)),
    "Min": (_minimum, range(64)),
    "Mul": (_multiply, (0, 1)),
    "Neg": (_negative, (0,)),
    "Sub": (_subtract, (0, 1)),
    "Trilu": (_with_zero, (0,)),
    "Where": (_union, (1, 2)),
}
"""The interval of a result, and which inputs decide."""
