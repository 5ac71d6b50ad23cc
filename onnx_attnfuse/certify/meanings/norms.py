"""Normalizations along the last axis or of channels, and the Gelus: of ONNX, and of com.microsoft with a sum in front."""

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

_FACTORS_ARE_OF_CHANNELS_SINCE = 21
_NORMALIZED_SUMS = {"SkipLayerNormalization": 4, "SkipSimplifiedLayerNormalization": 3}
"""Operators that add before they normalize, and the place of the bias among what they add."""
_SUM = 3
"""The place of the sum among their results."""
_HALF = Fraction(1, 2)
_CUBE, _ROOT_2_OVER_PI = 0.044715, math.sqrt(2 / math.pi)


def _mean(data: Array, place: Index, *, squared: bool = False, middle: Term | None = None) -> Term:
    """The mean of a row less `middle`, or of its squares."""
    bound = fresh(data.shape[-1])
    item = data.at(*place[:-1], bound)
    item = item if middle is None else subtract(item, middle)
    summed = sums.total(bound, multiply(item, item) if squared else item)
    return multiply(summed, function("inverse", to_real(data.shape[-1])))


def normalized(data: Array, epsilon: float, weight: Array | None, shift: Array | None, *, centred: bool) -> Array:
    """Rows less their mean if `centred`, over the root of the mean of their squares, times `weight` and plus `shift` if given."""

    def read(place: Index) -> Term:
        middle = _mean(data, place) if centred else None
        item = data.at(*place) if middle is None else subtract(data.at(*place), middle)
        power = add(_mean(data, place, squared=True, middle=middle), number(epsilon, "Real"))
        item = multiply(item, function("inverse", function("sqrt", power)))
        item = item if weight is None else multiply(item, weight.at(*arrays.aligned(place, weight.shape)))
        return item if shift is None else add(item, shift.at(*arrays.aligned(place, shift.shape)))

    return Array(data.shape, data.dtype, read)


def _alone(*, centred: bool) -> Meaning:
    """The meaning of LayerNormalization, if `centred`, or of RMSNormalization."""

    def meaning(call: Call) -> Sequence[Array]:
        data, shift = call.array(0), call.optional(2)
        if axis_of(call.attribute("axis", -1), data.rank) != data.rank - 1:
            raise Unsupported("a normalization over several axes")
        return [normalized(data, call.attribute("epsilon", 1e-5), call.array(1), shift, centred=centred)]

    return meaning


def _channels(call: Call) -> Sequence[Array]:
    """InstanceNormalization and GroupNormalization: groups of channels made level, times and plus a number for each channel."""
    data, weight, shift = call.array(0), call.array(1), call.array(2)
    count, each, epsilon = data.shape[1], call.attribute("num_groups"), call.attribute("epsilon", 1e-5)
    if count.op != "const" or (each is not None and call.opset < _FACTORS_ARE_OF_CHANNELS_SINCE):
        raise Unsupported("a normalization of channels whose number is not known, or with factors of groups")
    groups = int(count.data) if each is None else int(each)
    rest = arrays.product([number(int(count.data) // groups), *data.shape[2:]])
    rows = arrays.reshaped(data, [data.shape[0], number(groups), rest])

    def level(place: Index) -> Term:
        middle = _mean(rows, place)
        power = add(_mean(rows, place, squared=True, middle=middle), number(epsilon, "Real"))
        return multiply(subtract(rows.at(*place), middle), function("inverse", function("sqrt", power)))

    levelled = arrays.reshaped(Array(rows.shape, data.dtype, level), data.shape)

    def read(place: Index) -> Term:
        return add(multiply(levelled.at(*place), weight.at(place[1])), shift.at(place[1]))

    return [Array(data.shape, data.dtype, read)]


def _skip(*, centred: bool) -> Meaning:
    """The meaning of SkipLayerNormalization, if `centred`, or of SkipSimplifiedLayerNormalization."""

    def meaning(call: Call) -> Sequence[Array]:
        weight, shift, bias = call.array(2), call.optional(3) if centred else None, call.optional(4 if centred else 3)
        parts = [item for item in (call.array(0), call.optional(1), bias) if item is not None]
        total = arrays.elementwise(parts, parts[0].dtype, add)
        result = normalized(total, call.attribute("epsilon", 1e-12), weight, shift, centred=centred)
        return [result, _untold(total), _untold(total), total][: len(call.node.outputs)]

    return meaning


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


def _untold(array: Array) -> Array:
    """The statistics of rows, of which no more is known than their shape."""

    def read(place: Index) -> Term:
        raise Unsupported("the statistics of a normalization")

    return Array([*array.shape[:-1], number(1)], array.dtype, read)


def _gelu(item: Term) -> Term:
    inner = function("erf", multiply(item, number(math.sqrt(0.5), "Real")))
    return multiply(multiply(item, number(_HALF, "Real")), add(inner, number(1, "Real")))


def _fast_gelu(item: Term) -> Term:
    cube = multiply(multiply(multiply(item, item), item), number(_CUBE, "Real"))
    inner = function("tanh", multiply(add(item, cube), number(_ROOT_2_OVER_PI, "Real")))
    return multiply(multiply(item, number(_HALF, "Real")), add(inner, number(1, "Real")))


def _gelu_of_a_sum(call: Call) -> Sequence[Array]:
    """Gelu, BiasGelu or FastGelu, of what goes in and its bias."""
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


MEANINGS: Mapping[str, Meaning] = {
    "LayerNormalization": _alone(centred=True), "RMSNormalization": _alone(centred=False), "Gelu": _gelu_of_a_sum,
    "InstanceNormalization": _channels, "GroupNormalization": _channels,
}  # fmt: skip
CONTRIB_MEANINGS: Mapping[str, Meaning] = {
    "SkipLayerNormalization": _skip(centred=True),
    "SkipSimplifiedLayerNormalization": _skip(centred=False),
    "Gelu": _gelu_of_a_sum, "BiasGelu": _gelu_of_a_sum, "FastGelu": _gelu_of_a_sum, "QuickGelu": _quick_gelu,
}  # fmt: skip
