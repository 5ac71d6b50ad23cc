"""Normalizations that others are made of, and the Gelus, of ONNX and of com.microsoft."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import onnx_ir as ir

from onnx_attnfuse.certify import arrays, sums
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call, Meaning, axis_of
from onnx_attnfuse.certify.softmaxes import function
from onnx_attnfuse.certify.terms import Term, add, fresh, multiply, number, subtract, to_real
from onnx_attnfuse.graph.ops import is_contrib

_NORMALIZED_SUMS = {"SkipLayerNormalization": 4, "SkipSimplifiedLayerNormalization": 3}
"""Operators that add before they normalize, and the place of the bias among their addends."""
_SUM = 3
"""The place of the sum among their results."""
_HALF = Fraction(1, 2)
_CUBE, _ROOT_2_OVER_PI = 0.044715, math.sqrt(2 / math.pi)


def _mean(data: Array, place: Index, middle: Term | None = None) -> Term:
    """The mean of a row, or of the squares of the rest of it without that."""
    bound = fresh(data.shape[-1])
    item = data.at(*place[:-1], bound)
    summed = sums.total(bound, item if middle is None else multiply(subtract(item, middle), subtract(item, middle)))
    return multiply(summed, function("inverse", to_real(data.shape[-1])))


def _layer(call: Call) -> Sequence[Array]:
    """LayerNormalization: rows less their mean, over the root of the mean of their squares, times a weight and plus a shift."""
    data, weight, shift, epsilon = call.array(0), call.array(1), call.optional(2), call.attribute("epsilon", 1e-5)
    if axis_of(call.attribute("axis", -1), data.rank) != data.rank - 1:
        raise Unsupported("a normalization over several axes")

    def read(place: Index) -> Term:
        item = multiply(_level(data, place, epsilon), weight.at(*arrays.aligned(place, weight.shape)))
        return item if shift is None else add(item, shift.at(*arrays.aligned(place, shift.shape)))

    return [Array(data.shape, data.dtype, read)]


def _level(data: Array, place: Index, epsilon: float) -> Term:
    """An element less the mean of its row, over the root of the mean of such squares."""
    middle = _mean(data, place)
    power = add(_mean(data, place, middle), number(epsilon, "Real"))
    return multiply(subtract(data.at(*place), middle), function("inverse", function("sqrt", power)))


def _instance(call: Call) -> Sequence[Array]:
    """InstanceNormalization: each channel made level, times and plus a number for it."""
    data, weight, shift, epsilon = call.array(0), call.array(1), call.array(2), call.attribute("epsilon", 1e-5)
    rows = arrays.reshaped(data, [*data.shape[:2], arrays.product(data.shape[2:])])
    level = arrays.reshaped(Array(rows.shape, data.dtype, lambda place: _level(rows, place, epsilon)), data.shape)

    def read(place: Index) -> Term:
        return add(multiply(level.at(*place), weight.at(place[1])), shift.at(place[1]))

    return [Array(data.shape, data.dtype, read)]


def sum_beside(value: ir.Value) -> ir.Value | None:
    """The sum that a node of com.microsoft gives beside its normalization `value`; None for other values."""
    node = value.producer()
    if not is_contrib(node, *_NORMALIZED_SUMS):
        return None
    if value.index() != 0 or len(node.outputs) <= _SUM:
        return None
    return node.outputs[_SUM] if node.outputs[_SUM].name else None


def of_the_sum(node: ir.Node, total: ir.Value) -> Sequence[ir.Value | None]:
    """The inputs of such a node where its sum is known: that, nothing to add to it, weights."""
    return [total, None, *node.inputs[2 : _NORMALIZED_SUMS[node.op_type]]]


def _gelu(item: Term) -> Term:
    inner = function("erf", multiply(item, number(math.sqrt(0.5), "Real")))
    return multiply(multiply(item, number(_HALF, "Real")), add(inner, number(1, "Real")))


def _fast_gelu(item: Term) -> Term:
    cube = multiply(multiply(multiply(item, item), item), number(_CUBE, "Real"))
    inner = function("tanh", multiply(add(item, cube), number(_ROOT_2_OVER_PI, "Real")))
    return multiply(multiply(item, number(_HALF, "Real")), add(inner, number(1, "Real")))


def _gelu_of_a_sum(call: Call) -> Sequence[Array]:
    """Gelu, BiasGelu or FastGelu, of an input and its bias."""
    compute = _fast_gelu if call.node.op_type == "FastGelu" or call.attribute("approximate", "none") == "tanh" else _gelu
    parts = [call.array(0), *([] if call.optional(1) is None else [call.array(1)])]

    def computed(*items: Term) -> Term:
        return compute(add(*items))

    return [arrays.elementwise(parts, parts[0].dtype, computed)]


def _quick_gelu(call: Call) -> Sequence[Array]:
    alpha, data = number(call.attribute("alpha", 1.702), "Real"), call.array(0)

    def computed(item: Term) -> Term:
        return multiply(item, function("sigmoid", multiply(item, alpha)))

    return [arrays.elementwise([data], data.dtype, computed)]


MEANINGS: Mapping[str, Meaning] = {"LayerNormalization": _layer, "Gelu": _gelu_of_a_sum, "InstanceNormalization": _instance}
CONTRIB_MEANINGS: Mapping[str, Meaning] = {
    "Gelu": _gelu_of_a_sum, "BiasGelu": _gelu_of_a_sum, "FastGelu": _gelu_of_a_sum, "QuickGelu": _quick_gelu,
}  # fmt: skip
