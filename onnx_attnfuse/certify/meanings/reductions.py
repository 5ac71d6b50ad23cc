"""Operators that go over an axis: products, sums, the largest, the softmax, normalizations that others are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays, sums
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call, Meaning, axis_of
from onnx_attnfuse.certify.meanings.elements import absolute
from onnx_attnfuse.certify.softmaxes import function, largest, weight
from onnx_attnfuse.certify.terms import (
    ONE,
    ZERO,
    Term,
    add,
    conjoin,
    free,
    fresh,
    ite,
    multiply,
    number,
    product,
    subtract,
    to_real,
)
from onnx_attnfuse.graph.ops import is_contrib

_NORMALIZED_SUMS = {"SkipLayerNormalization": 4, "SkipSimplifiedLayerNormalization": 3}
"""Operators that add before they normalize, and the place of the bias among their addends."""
_SUM = 3
"""The place of the sum among their results."""
_MAX_PLACES = 16
"""The places of a convolution's kernel, each of which is a summand."""


def _matmul(call: Call) -> Sequence[Array]:
    return [arrays.matmul(call.array(0), call.array(1))]


def _scaled(call: Call) -> Array:
    """A product of matrices that are turned where attributes say so, times a number."""
    sides = [call.array(place) for place in (0, 1)]
    for place, name in enumerate(("transA", "transB")):
        rank = sides[place].rank
        if call.attribute(name, 0) and rank > 1:
            sides[place] = arrays.permuted(sides[place], [*range(rank - 2), rank - 1, rank - 2])
    alpha, result = number(call.attribute("alpha", 1.0), "Real"), arrays.matmul(*sides)
    return Array(result.shape, result.dtype, lambda place: multiply(alpha, result.at(*place)))


def _gemm(call: Call) -> Sequence[Array]:
    scaled, added, beta = _scaled(call), call.optional(2), number(call.attribute("beta", 1.0), "Real")
    if added is None:
        return [scaled]

    def compute(one: Term, other: Term) -> Term:
        return add(one, multiply(beta, other))

    return [arrays.elementwise([scaled, added], scaled.dtype, compute)]


def _fused_matmul(call: Call) -> Sequence[Array]:
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise Unsupported("a FusedMatMul that moves the batch")
    return [_scaled(call)]


def _einsum(call: Call) -> Sequence[Array]:
    text = call.attribute("equation").replace(" ", "")
    inputs = [call.array(place) for place in range(len(call.inputs))]
    if "->" not in text or "." in text:
        raise Unsupported("an equation with an ellipsis or without an arrow")
    sides, result = text.split("->")
    sides = sides.split(",")
    lengths: dict[str, Term] = {}
    for side, array in zip(sides, inputs, strict=True):
        for letter, length in zip(side, array.shape, strict=True):
            lengths[letter] = length if lengths.get(letter, ONE) is ONE else lengths[letter]
    summed = [letter for letter in lengths if letter not in result]

    def read(place: Index) -> Term:
        places = dict(zip(result, place, strict=True)) | {letter: fresh(lengths[letter]) for letter in summed}
        item = number(1, inputs[0].sort)
        for side, array in zip(sides, inputs, strict=True):
            item = multiply(item, array.at(*arrays.aligned(tuple(places[letter] for letter in side), array.shape)))
        for letter in summed:
            item = sums.total(places[letter], item)
        return item

    return [Array([lengths[letter] for letter in result], inputs[0].dtype, read)]


def _reduced(reduce: Callable[[Term, Term], Term]) -> Meaning:
    def meaning(call: Call) -> Sequence[Array]:
        data, axes, leaves = call.array(0), call.axes(1), call.attribute("noop_with_empty_axes", 0)
        if not axes and leaves:
            return [data]
        gone = sorted(axis_of(axis, data.rank) for axis in axes or range(data.rank))
        keeps = bool(call.attribute("keepdims", 1))
        shape = [ONE if axis in gone else length for axis, length in enumerate(data.shape) if keeps or axis not in gone]

        def read(place: Index) -> Term:
            left = iter(place)
            full = [next(left) if keeps or axis not in gone else ZERO for axis in range(data.rank)]
            bounds = {axis: fresh(data.shape[axis]) for axis in gone}
            item = data.at(*(bounds.get(axis, full[axis]) for axis in range(data.rank)))
            for axis in gone:
                item = reduce(bounds[axis], item)
            return item

        return [Array(shape, data.dtype, read)]

    return meaning


def _mean(call: Call) -> Sequence[Array]:
    (summed,) = _reduced(sums.total)(call)
    assert summed is not None
    data, axes = call.array(0), call.axes(1)
    if data.sort != "Real":
        raise Unsupported("a mean of integers, which is rounded")
    gone = {axis_of(axis, data.rank) for axis in axes or range(data.rank)}
    count = function("inverse", to_real(product(length for axis, length in enumerate(data.shape) if axis in gone)))
    return [Array(summed.shape, summed.dtype, lambda place: multiply(summed.at(*place), count))]


def _smallest(bound: Term, body: Term) -> Term:
    return multiply(number(-1, body.sort), largest(bound, multiply(number(-1, body.sort), body)))


def _absolute_sum(bound: Term, body: Term) -> Term:
    return sums.total(bound, absolute(body))


def _softmax(call: Call) -> Sequence[Array]:
    data = call.array(0)
    axis = axis_of(call.attribute("axis", -1 if call.opset >= 13 else 1), data.rank)
    if call.opset < 13 and axis != data.rank - 1:
        raise Unsupported("a softmax over several axes")

    def read(place: Index) -> Term:
        return weight(lambda key: data.at(*place[:axis], key, *place[axis + 1 :]), data.shape[axis], place[axis])

    return [Array(data.shape, data.dtype, read)]


def _running_sum(call: Call) -> Sequence[Array]:
    """The sum up to a place, or from it on; a summand that is equal at all of them, times their number."""
    data = call.array(0)
    (axis,) = call.array(1).numbers() if call.array(1).rank else [int(call.array(1).at().data)]
    axis = axis_of(axis, data.rank)
    ask = arithmetic.below if call.attribute("exclusive", 0) else arithmetic.at_most
    reverse = call.attribute("reverse", 0)

    def read(place: Index) -> Term:
        bound = fresh(data.shape[axis])
        item = data.at(*place[:axis], bound, *place[axis + 1 :])
        if bound not in free(item):
            count = subtract(subtract(data.shape[axis], place[axis]), ONE) if reverse else place[axis]
            count = count if ask is arithmetic.below else add(count, ONE)
            return multiply(item, count if data.sort == "Int" else to_real(count))
        summed = ask(place[axis], bound) if reverse else ask(bound, place[axis])
        return sums.total(bound, ite(summed, item, number(0, data.sort)))

    return [Array(data.shape, data.dtype, read)]


def _by_channel(call: Call) -> Sequence[Array]:
    """A convolution of each channel by itself along one axis, as a sum over the places of its kernel."""
    data, weight, bias = call.array(0), call.array(1), call.optional(2)
    (step,), (before, after) = call.attribute("dilations", [1]), call.attribute("pads", [0, 0])
    size = weight.shape[-1]
    if weight.rank != 3 or size.op != "const" or size.data > _MAX_PLACES or call.attribute("group", 1) != weight.shape[0].data:
        raise Unsupported("a convolution over channels or several axes, or one with a long kernel")
    call.asked.add("kernel_shape")
    if call.attribute("strides", [1]) != [1] or call.attribute("auto_pad", "NOTSET") != "NOTSET" or weight.shape[1] is not ONE:
        raise Unsupported("a convolution that leaves positions out, or that pads by a rule")
    length, last = data.shape[2], (size.data - 1) * step

    def seen(place: Index, position: Term) -> Term:
        item = data.at(*place[:2], position)
        if not (before or after):
            return item
        inside = conjoin(arithmetic.at_most(ZERO, position), arithmetic.below(position, length))
        return ite(inside, item, number(0, "Real"))

    def read(place: Index) -> Term:
        channel = place[1]
        parts = [
            multiply(weight.at(channel, ZERO, number(at)), seen(place, add(place[2], number(at * step - before))))
            for at in range(size.data)
        ]
        return add(*parts, *([] if bias is None else [bias.at(channel)]))

    return [Array([*data.shape[:2], add(length, number(before + after - last))], data.dtype, read)]


def _row_mean(data: Array, place: Index, middle: Term | None = None) -> Term:
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
    middle = _row_mean(data, place)
    power = add(_row_mean(data, place, middle), number(epsilon, "Real"))
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


MEANINGS: Mapping[str, Meaning] = {
    "Conv": _by_channel, "LayerNormalization": _layer, "InstanceNormalization": _instance,
    "MatMul": _matmul, "Gemm": _gemm, "Einsum": _einsum, "Softmax": _softmax, "CumSum": _running_sum,
    "ReduceSum": _reduced(sums.total), "ReduceL1": _reduced(_absolute_sum), "ReduceMean": _mean,
    "ReduceMax": _reduced(largest), "ReduceMin": _reduced(_smallest),
}  # fmt: skip
CONTRIB_MEANINGS: Mapping[str, Meaning] = {"FusedMatMul": _fused_matmul}
UNCHANGED: Mapping[str, float] = {"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0}
"""The attributes with which FusedMatMul is MatMul."""
