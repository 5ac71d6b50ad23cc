"""Operators that arrange elements: views, slices, gathers, shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call, Meaning, axis_of, wrapped
from onnx_attnfuse.certify.terms import (
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Term,
    add,
    conjoin,
    disjoin,
    fresh,
    ite,
    multiply,
    number,
    polynomial,
    product,
    subtract,
    to_real,
    walk,
)

_INT64 = ir.DataType.INT64
_FAR = 1 << 31


def _identity(call: Call) -> Sequence[Array]:
    return [call.array(0)]


def _shape(call: Call) -> Sequence[Array]:
    items = call.array(0).shape[slice(call.attribute("start", 0), call.attribute("end"))]
    return [arrays.listed(items)]


def _size(call: Call) -> Sequence[Array]:
    return [arrays.scalar(product(call.array(0).shape), _INT64)]


def _reshape(call: Call) -> Sequence[Array]:
    data, wanted = call.array(0), call.array(1).items()
    keeps = not call.attribute("allowzero", 0)
    shape = [data.shape[axis] if keeps and item is ZERO else item for axis, item in enumerate(wanted)]
    open_axes = [axis for axis, item in enumerate(shape) if item.op == "const" and item.data < 0]
    if open_axes:
        known = product(item for axis, item in enumerate(shape) if axis not in open_axes)
        total = product(data.shape)
        shape[open_axes[0]] = arithmetic.exact_quotient(total, known) or arithmetic.divide(total, known)
    return [arrays.reshaped(data, shape)]


def _flatten(call: Call) -> Sequence[Array]:
    data = call.array(0)
    axis = axis_of(call.attribute("axis", 1), data.rank)
    return [arrays.reshaped(data, [product(data.shape[:axis]), product(data.shape[axis:])])]


def _squeeze(call: Call) -> Sequence[Array]:
    data = call.array(0)
    given = call.axes(1)
    axes = [axis for axis, length in enumerate(data.shape) if length is ONE] if given is None else given
    gone = {axis_of(axis, data.rank) for axis in axes}
    kept = [axis for axis in range(data.rank) if axis not in gone]

    def read(place: Index) -> Term:
        full = [ZERO] * data.rank
        for axis, item in zip(kept, place, strict=True):
            full[axis] = item
        return data.at(*full)

    return [Array([data.shape[axis] for axis in kept], data.dtype, read)]


def _unsqueeze(call: Call) -> Sequence[Array]:
    data, axes = call.array(0), call.axes(1) or []
    rank = data.rank + len(axes)
    new = {axis_of(axis, rank) for axis in axes}
    kept = [axis for axis in range(rank) if axis not in new]
    shape = [ONE] * rank
    for axis, length in zip(kept, data.shape, strict=True):
        shape[axis] = length
    return [Array(shape, data.dtype, lambda place: data.at(*(place[axis] for axis in kept)))]


def _transpose(call: Call) -> Sequence[Array]:
    data = call.array(0)
    return [arrays.permuted(data, call.attribute("perm") or list(reversed(range(data.rank))))]


def _expand(call: Call) -> Sequence[Array]:
    return [arrays.expanded(call.array(0), call.array(1).items())]


def _concat(call: Call) -> Sequence[Array]:
    parts = [call.array(place) for place in range(len(call.inputs))]
    return [arrays.concatenated(parts, axis_of(call.attribute("axis"), parts[0].rank))]


def _clamped(item: Term, length: Term, low: Term, high: Term) -> Term:
    if item.op == "const" and abs(item.data) >= _FAR:
        return high if item.data > 0 else low
    return arithmetic.larger(low, arithmetic.smaller(wrapped(item, length), high))


def _slice(call: Call) -> Sequence[Array]:
    data = call.array(0)
    if call.opset < 10:
        raise Unsupported("Slice by attributes")
    starts, ends = call.array(1).items(), call.array(2).items()
    axes = call.axes(3) or list(range(len(starts)))
    steps = call.axes(4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = axis_of(axis, data.rank)
        length = data.shape[place]
        if step == 1:
            first = _clamped(start, length, ZERO, length)
            count = subtract(_clamped(end, length, ZERO, length), first)
        elif step > 1:
            first = _clamped(start, length, ZERO, length)
            gap = subtract(_clamped(end, length, ZERO, length), first)
            count = arithmetic.divide(add(gap, number(step - 1)), number(step))
        elif step == -1 and end.op == "const" and end.data <= -_FAR:
            first = _clamped(start, length, ZERO, subtract(length, ONE))
            count = add(first, ONE)
        else:
            raise Unsupported(f"Slice by steps of {step}")
        data = arrays.sliced(data, place, first, arithmetic.larger(ZERO, count), step)
    return [data]


def _split(call: Call) -> Sequence[Array]:
    data = call.array(0)
    axis = axis_of(call.attribute("axis", 0), data.rank)
    count = call.attribute("num_outputs", len(call.node.outputs))
    given = call.attribute("split")
    if given is not None:
        lengths = list(map(number, given))
    elif call.optional(1) is not None:
        lengths = call.array(1).items()
    else:
        part = arithmetic.divide(add(data.shape[axis], number(count - 1)), number(count))
        lengths = [part] * (count - 1) + [subtract(data.shape[axis], multiply(number(count - 1), part))]
    start, result = ZERO, list[Array]()
    for length in lengths:
        result.append(arrays.sliced(data, axis, start, length))
        start = add(start, length)
    return result


def _gather(call: Call) -> Sequence[Array]:
    data, places = call.array(0), call.array(1)
    axis = axis_of(call.attribute("axis", 0), data.rank)
    end = axis + places.rank

    def read(place: Index) -> Term:
        item = call.wrapped(places.at(*place[axis:end]), data.shape[axis])
        return data.at(*place[:axis], item, *place[end:])

    return [Array([*data.shape[:axis], *places.shape, *data.shape[axis + 1 :]], data.dtype, read)]


def _gather_elements(call: Call) -> Sequence[Array]:
    data, places = call.array(0), call.array(1)
    axis = axis_of(call.attribute("axis", 0), data.rank)

    def read(place: Index) -> Term:
        return data.at(*place[:axis], call.wrapped(places.at(*place), data.shape[axis]), *place[axis + 1 :])

    return [Array(places.shape, data.dtype, read)]


def _gather_nd(call: Call) -> Sequence[Array]:
    data, places = call.array(0), call.array(1)
    batch = int(call.attribute("batch_dims", 0))
    if places.shape[-1].op != "const":
        raise Unsupported("GatherND of unknown depth")
    depth, outer = int(places.shape[-1].data), places.rank - 1

    def read(place: Index) -> Term:
        items = [call.wrapped(places.at(*place[:outer], number(item)), data.shape[batch + item]) for item in range(depth)]
        return data.at(*place[:batch], *items, *place[outer:])

    return [Array([*places.shape[:-1], *data.shape[batch + depth :]], data.dtype, read)]


def _scatter_nd(call: Call) -> Sequence[Array]:
    """The updates where their place is that of an element, else the data.

    Each number of a place is an index of the updates, moved by a number of its own, or the same for all updates; so no two
    updates have one place.
    """
    data, places, updates = (call.array(place) for place in range(3))
    depth, outer = places.shape[-1], places.rank - 1
    if call.attribute("reduction", "none") != "none" or depth.op != "const":
        raise Unsupported("ScatterND that adds, or of unknown depth")
    own = [ZERO if length is ONE else fresh(length) for length in places.shape[:outer]]
    numbers = [call.wrapped(places.at(*own, number(axis)), data.shape[axis]) for axis in range(depth.data)]
    moved = dict[Term, tuple[int, Term]]()
    for axis, item in enumerate(numbers):
        inside = [place for place in own if place is not ZERO and place in walk(item)]
        if not inside:
            continue
        by = subtract(item, inside[0])
        if len(inside) > 1 or inside[0] in moved or inside[0] in walk(by):
            raise Unsupported("ScatterND to places that are no part of the axes")
        moved[inside[0]] = axis, by
    if any(place is not ZERO and place not in moved for place in own):
        raise Unsupported("ScatterND of several updates to one place")

    def read(place: Index) -> Term:
        found = [ZERO if item is ZERO else subtract(place[moved[item][0]], moved[item][1]) for item in own]
        tests = [
            conjoin(arithmetic.at_most(ZERO, item), arithmetic.below(item, length))
            for item, length in zip(found, places.shape, strict=False)
            if item is not ZERO
        ]
        fixed = set(range(depth.data)).difference(axis for axis, _ in moved.values())
        tests += [arithmetic.equals(place[axis], numbers[axis]) for axis in fixed]
        return ite(conjoin(*tests), updates.at(*found, *place[depth.data :]), data.at(*place))

    return [Array(data.shape, data.dtype, read)]


def _tile(call: Call) -> Sequence[Array]:
    data, times = call.array(0), call.array(1).items()
    shape = [multiply(length, count) for length, count in zip(data.shape, times, strict=True)]

    def read(place: Index) -> Term:
        items = (
            item if count is ONE else ZERO if length is ONE else arithmetic.modulo(item, length)
            for item, length, count in zip(place, data.shape, times, strict=True)
        )
        return data.at(*items)

    return [Array(shape, data.dtype, read)]


def _range(call: Call) -> Sequence[Array]:
    """`start + step * i`."""
    start, limit, step = (call.array(place).at() for place in range(3))
    if step.op != "const" or not step.data:
        raise Unsupported("Range by an unknown step")
    gap = _whole(subtract(limit, start) if step.data > 0 else subtract(start, limit))
    width = int(abs(step.data))
    if gap is not None and width == abs(step.data):
        count = gap if width == 1 else arithmetic.divide(add(gap, number(width - 1)), number(width))
    elif start.op == limit.op == "const":
        count = number(math.ceil(float((limit.data - start.data) / step.data)))
    else:
        raise Unsupported("Range of floats that may not be whole")

    def read(place: Index) -> Term:
        return add(start, multiply(step, place[0] if start.sort == "Int" else to_real(place[0])))

    return [Array([arithmetic.larger(ZERO, count)], call.array(0).dtype, read)]


def _whole(term: Term) -> Term | None:
    """A number as an integer, where it is made of integers alone."""
    if term.sort == "Int":
        return term
    total = ZERO
    for atoms, factor in polynomial(term).items():
        if factor != int(factor) or any(atom.op != "real" for atom in atoms):
            return None
        total = add(total, multiply(number(factor), product(atom.args[0] for atom in atoms)))
    return total


def _constant_of_shape(call: Call) -> Sequence[Array]:
    value = call.attribute("value")
    content = np.zeros(1, np.float32) if value is None else value.numpy()
    dtype = ir.DataType.FLOAT if value is None else value.dtype
    item = arrays.literal(content.reshape(-1)[0], arrays.sort_of(dtype))
    return [Array(call.array(0).items(), dtype, lambda _: item)]


def _pad(call: Call) -> Sequence[Array]:
    data = call.array(0)
    listed = call.attribute("pads")
    widths = call.array(1).items() if listed is None else list(map(number, listed))
    given = call.optional(2)
    filler = given.at() if given is not None else arrays.literal(0, data.sort)
    before, after = widths[: data.rank], widths[data.rank :]
    shape = [add(length, low, high) for length, low, high in zip(data.shape, before, after, strict=True)]

    def read(place: Index) -> Term:
        moved = [subtract(item, low) for item, low in zip(place, before, strict=True)]
        tests = [
            conjoin(arithmetic.below(item, length), arithmetic.at_most(ZERO, item))
            for item, length in zip(moved, data.shape, strict=True)
        ]
        return ite(conjoin(*tests), data.at(*moved), filler)

    return [Array(shape, data.dtype, read)]


def _trilu(call: Call) -> Sequence[Array]:
    data, given, upper = call.array(0), call.optional(1), call.attribute("upper", 1)
    offset = ZERO if given is None else given.items()[0]
    zero = {"Int": ZERO, "Bool": FALSE}.get(data.sort) or number(0, "Real")

    def read(place: Index) -> Term:
        gap = subtract(place[-1], place[-2])
        kept = arithmetic.at_most(offset, gap) if upper else arithmetic.at_most(gap, offset)
        return ite(kept, data.at(*place), zero)

    return [Array(data.shape, data.dtype, read)]


def _eye_like(call: Call) -> Sequence[Array]:
    data = call.array(0)
    dtype = ir.DataType(call.attribute("dtype", int(data.dtype)))
    offset = number(call.attribute("k", 0))
    one, zero = (
        (TRUE, FALSE) if dtype == ir.DataType.BOOL else (number(1, arrays.sort_of(dtype)), number(0, arrays.sort_of(dtype)))
    )
    return [
        Array(data.shape, dtype, lambda place: ite(arithmetic.equals(add(place[0], offset), place[1]), one, zero)),
    ]


def _one_hot(call: Call) -> Sequence[Array]:
    indices, depth, values = call.array(0), call.array(1).items()[0], call.array(2)

    def read(place: Index) -> Term:
        index = indices.at(*place[:-1])
        hot = disjoin(*(arithmetic.equals(place[-1], item) for item in (index, add(index, depth))))
        return ite(hot, values.at(ONE), values.at(ZERO))

    return [Array([*indices.shape, depth], values.dtype, read)]


def _unfold(call: Call) -> Sequence[Array]:
    """Pieces of the last axis, each `step` after the one before, as an axis of their own."""
    data = call.array(0)
    size, step = number(call.attribute("size")), number(call.attribute("step", 1))
    if axis_of(call.attribute("dim", -1), data.rank) != data.rank - 1:
        raise Unsupported("pieces of an axis in the middle")
    count = add(arithmetic.divide(subtract(data.shape[-1], size), step), number(1))

    def read(place: Index) -> Term:
        return data.at(*place[:-2], add(multiply(place[-2], step), place[-1]))

    return [Array([*data.shape[:-1], count, size], data.dtype, read)]


MEANINGS: Mapping[str, Meaning] = {
    "Identity": _identity, "Shape": _shape, "Size": _size, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Transpose": _transpose, "Expand": _expand, "Concat": _concat, "Slice": _slice, "Split": _split,
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd, "ScatterND": _scatter_nd,
    "Tile": _tile, "Range": _range, "ConstantOfShape": _constant_of_shape, "Pad": _pad, "Trilu": _trilu,
    "EyeLike": _eye_like, "OneHot": _one_hot,
}  # fmt: skip
CONTRIB_MEANINGS: Mapping[str, Meaning] = {"UnfoldTensor": _unfold}
