"""Arrays as functions from indices to terms, and the ways to look at one: the parts of every operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, sums
from onnx_attnfuse.certify.interned import PROOF
from onnx_attnfuse.certify.terms import (
    FALSE,
    NAN,
    NINF,
    ONE,
    TRUE,
    WEIGHT,
    ZERO,
    Sort,
    Term,
    add,
    conjoin,
    disjoin,
    element,
    fresh,
    index,
    ite,
    multiply,
    number,
    product,
    subtract,
    truth,
)
from onnx_attnfuse.graph.constants import Array as NumPyArray

Index = tuple[Term, ...]
Read = Callable[[Index], Term]
_MAX_LISTED = 64
_MAX_FLOATS, _MAX_WEIGHTS = 16, 4
"""A small constant is a choice of its elements by their index; one of ordinary numbers, which may be a bias, if it is smaller."""


class Unsupported(Exception):
    """The meaning of a node is not known here: its elements stay uninterpreted."""


class Array:
    """An array of known rank: its shape as terms, and its elements by their indices."""

    def __init__(self, shape: Sequence[Term], dtype: ir.DataType, read: Read) -> None:
        self.shape, self.dtype, self._read = tuple(shape), dtype, read
        self._known: dict[Index, Term] = {}

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def sort(self) -> Sort:
        """The sort of the elements."""
        return sort_of(self.dtype)

    def at(self, *place: Term) -> Term:
        """The element at an index, one term for each axis."""
        found = self._known.get(place)
        if found is None:
            found = self._known[place] = self._read(place)
        return found

    def items(self) -> list[Term]:
        """All elements of an array of one axis or none, whose length must be a number.

        Raises:
            Unsupported: It is not.
        """
        if self.rank == 0:
            return [self.at()]
        if self.rank > 1 or self.shape[0].op != "const" or self.shape[0].data > _MAX_LISTED:
            raise Unsupported("a list of unknown length")
        return [self.at(number(place)) for place in range(self.shape[0].data)]

    def numbers(self) -> list[int]:
        """All elements as numbers.

        Raises:
            Unsupported: One is none.
        """
        if any(item.op != "const" for item in self.items()):
            raise Unsupported("a number that is computed at run time")
        return [int(item.data) for item in self.items()]


def sort_of(dtype: ir.DataType) -> Sort:
    """The sort of an element type.

    Raises:
        Unsupported: There is none.
    """
    if dtype == ir.DataType.BOOL:
        return "Bool"
    if dtype.is_floating_point():
        return "Real"
    if dtype.is_integer():
        return "Int"
    raise Unsupported(f"elements of type {dtype}")


def unknown(name: str, shape: Sequence[Term], dtype: ir.DataType) -> Array:
    """An array of which only name, shape and type are known."""
    sort = sort_of(dtype)
    return Array(shape, dtype, lambda place: element(name, sort, place))


def listed(items: Sequence[Term], dtype: ir.DataType = ir.DataType.INT64) -> Array:
    """A list of terms."""
    return Array([number(len(items))], dtype, lambda place: chosen(items, place[0]))


def chosen(items: Sequence[Term], place: Term) -> Term:
    """The item at a place."""
    if place.op == "const":
        at = int(place.data)
        return items[at] if 0 <= at < len(items) else element("outside", items[0].sort, ())
    result = items[-1]
    for count, item in reversed(list(enumerate(items[:-1]))):
        result = ite(arithmetic.equals(place, number(count)), item, result)
    return result


def scalar(term: Term, dtype: ir.DataType) -> Array:
    """An array of no axis."""
    return Array([], dtype, lambda _: term)


def constant(array: NumPyArray, name: str, dtype: ir.DataType, *, listed: bool = True) -> Array:
    """A constant: read where its index is a number, a formula where its elements follow one, else uninterpreted by its name."""
    sort, shape = sort_of(dtype), [number(length) for length in array.shape]
    array = without_repeats(array)
    repeated = {axis for axis, length in enumerate(array.shape) if length != shape[axis].data}
    formulas: dict[tuple[int | None, ...], Read | None] = {}

    def read(place: Index) -> Term:
        place = tuple(ZERO if axis in repeated and _lies_in(item, shape[axis]) else item for axis, item in enumerate(place))
        fixed = tuple(
            int(item.data) if item.op == "const" and 0 <= item.data < length else None
            for item, length in zip(place, array.shape, strict=True)
        )
        part = array[tuple(slice(None) if item is None else item for item in fixed)]
        if not np.ndim(part):
            return literal(part, sort)
        if fixed not in formulas:
            formulas[fixed] = _formula(part, sort)
        formula = formulas[fixed]
        if formula is not None:
            return formula(tuple(item for item, at in zip(place, fixed, strict=True) if at is None))
        most = _MAX_LISTED if sort != "Real" else _MAX_WEIGHTS if name.startswith(WEIGHT) else _MAX_FLOATS
        if listed and array.size <= most:
            return _tabulated(array, place, sort)
        return element(name, sort, place)

    return Array(shape, dtype, read)


def without_repeats(array: NumPyArray) -> NumPyArray:
    """An array with length 1 along each axis that it repeats its elements along."""
    for axis, length in enumerate(array.shape):
        if length > 1 and (array == (first := np.take(array, [0], axis))).all():
            array = first
    return array


def _lies_in(item: Term, length: Term) -> bool:
    return item.op != "const" or 0 <= item.data < length.data


def _tabulated(array: NumPyArray, place: Index, sort: Sort) -> Term:
    if not place:
        return literal(array[()], sort)
    return chosen([_tabulated(part, place[1:], sort) for part in array], place[0])


def literal(value: object, sort: Sort) -> Term:
    """One element of a constant as a term.

    Raises:
        Unsupported: It is plus infinity.
    """
    if sort == "Bool":
        return truth(bool(value))
    if sort == "Int":
        return number(int(value))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    content = float(value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    if np.isposinf(content):
        raise Unsupported("plus infinity")
    return NAN if np.isnan(content) else NINF if np.isneginf(content) else number(content, "Real")


def _formula(array: NumPyArray, sort: Sort) -> Read | None:
    """A formula of the elements by their indices, checked: evenly growing numbers, or two on a band of a matrix."""
    if array.size < 2 or array.size > 1 << 22:
        return None
    first = array.reshape(-1)[0]
    if bool((array == first).all()):
        return lambda _: literal(first, sort)
    return (_even(array) if sort == "Int" else None) or _band(array, sort)


def _even(array: NumPyArray) -> Read | None:
    """`a + b * i + c * j`, of integers."""
    numbers = array.astype(np.int64) if array.dtype.kind in "iu" else None
    if numbers is None:
        return None
    start = int(numbers.reshape(-1)[0])
    steps = [0 if length == 1 else int(np.take(numbers, 1, axis).flat[0]) - start for axis, length in enumerate(array.shape)]
    places = np.indices(array.shape, sparse=True)
    if not np.array_equal(start + sum(step * place for step, place in zip(steps, places, strict=True)), numbers):
        return None
    return lambda place: add(
        number(start), *(multiply(number(step), item) for step, item in zip(steps, place, strict=True) if step)
    )


def _band(array: NumPyArray, sort: Sort) -> Read | None:
    """Two numbers, one in a band along the diagonal of two axes, `low <= j - i <= high`; all other axes repeat them."""
    low, high = array.min(), array.max()
    if not bool(((array == low) | (array == high)).all()):
        return None
    axes = [axis for axis in range(array.ndim) if (array != np.take(array, [0], axis)).any()]
    if len(axes) != 2:
        return None
    table: NumPyArray = array[tuple(slice(None) if axis in axes else 0 for axis in range(array.ndim))]
    count, width = (int(array.shape[axis]) for axis in axes)
    rows: NumPyArray = np.arange(count).reshape(count, 1)
    columns: NumPyArray = np.arange(width)
    gaps: NumPyArray = np.subtract(columns, rows)
    for inner, outer in ((table[-1, 0], table[0, -1]), (low, high), (high, low)):
        band: NumPyArray = np.equal(table, inner)
        least, most = int(gaps[band].min()), int(gaps[band].max())
        if inner != outer and np.array_equal((least <= gaps) & (gaps <= most), band):
            inside, outside = literal(inner, sort), literal(outer, sort)
            first = None if least == gaps.min() else number(least)
            last = None if most == gaps.max() else number(most)
            return lambda place: ite(_lies_between(subtract(place[axes[1]], place[axes[0]]), first, last), inside, outside)
    return None


def _lies_between(term: Term, first: Term | None, last: Term | None) -> Term:
    below = TRUE if last is None else arithmetic.at_most(term, last)
    return below if first is None else conjoin(below, arithmetic.at_most(first, term))


def elementwise(arrays: Sequence[Array], dtype: ir.DataType, compute: Callable[..., Term]) -> Array:
    """An element of each array, broadcast, computed to one."""
    shape = broadcast_shape([array.shape for array in arrays])
    return Array(shape, dtype, lambda place: compute(*(array.at(*aligned(place, array.shape)) for array in arrays)))


def broadcast_shape(shapes: Sequence[Sequence[Term]]) -> list[Term]:
    """The shape that several come to; different lengths of which none is 1 are taken to be the same."""
    rank = max(map(len, shapes))
    padded = [[ONE] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [_broadcast(lengths) for lengths in zip(*padded, strict=True)]


def _broadcast(lengths: Sequence[Term]) -> Term:
    """The length that several come to, case by case where one depends on a test."""
    for place, length in enumerate(lengths):
        if length.op == "ite" and ONE in length.args:
            return ite(length.args[0], *(_broadcast([*lengths[:place], part, *lengths[place + 1 :]]) for part in length.args[1:]))
    others = [length for length in lengths if length is not ONE]
    PROOF.met.update(dict.fromkeys(itertools.combinations(dict.fromkeys(others), 2)))
    numbers = [length for length in others if length.op == "const"]
    return (numbers or others or [ONE])[0]


def met() -> Iterator[Term]:
    """Facts on lengths that met since this was last asked: they are equal, or one of them is 1 and repeated."""
    pairs = list(PROOF.met)
    PROOF.met.clear()
    for one, other in pairs:
        yield disjoin(arithmetic.equals(one, other), arithmetic.equals(one, ONE), arithmetic.equals(other, ONE))


def aligned(place: Index, shape: Sequence[Term]) -> Index:
    """The index into an array of `shape` that is repeated to the rank of `place`."""
    trailing = place[len(place) - len(shape) :]
    return tuple(ZERO if length is ONE else item for item, length in zip(trailing, shape, strict=True))


def expanded(array: Array, shape: Sequence[Term]) -> Array:
    """The array repeated along axes of length 1."""
    target = broadcast_shape([array.shape, shape])
    return Array(target, array.dtype, lambda place: array.at(*aligned(place, array.shape)))


def permuted(array: Array, order: Sequence[int]) -> Array:
    """The array with its axes in another order."""
    back = [order.index(axis) for axis in range(array.rank)]
    return Array([array.shape[axis] for axis in order], array.dtype, lambda place: array.at(*(place[axis] for axis in back)))


def reshaped(array: Array, shape: Sequence[Term]) -> Array:
    """The array's elements in the same order under another shape; leading or trailing axes may stay."""
    kept, last, count = 0, 0, min(array.rank, len(shape))
    while kept < count and array.shape[kept] is shape[kept]:
        kept += 1
    while last < count - kept and array.shape[-1 - last] is shape[-1 - last]:
        last += 1
    inner, outer = array.shape[kept : array.rank - last], tuple(shape[kept : len(shape) - last])

    def read(place: Index) -> Term:
        flat = ZERO
        for item, length in zip(place[kept : len(shape) - last], outer, strict=True):
            flat = add(multiply(flat, length), item)
        places: list[Term] = []
        for axis in range(len(inner)):
            inner_size = product(inner[axis + 1 :])
            item = arithmetic.divide(flat, inner_size)
            places.append(item)
            flat = subtract(flat, multiply(item, inner_size))
        return array.at(*place[:kept], *places, *place[len(shape) - last :])

    return Array(shape, array.dtype, read)


def concatenated(arrays: Sequence[Array], axis: int) -> Array:
    """Arrays concatenated."""
    starts = list(itertools.accumulate((array.shape[axis] for array in arrays), add, initial=ZERO))
    shape = list(arrays[0].shape)
    for array in arrays[1:]:
        shape = [one if one.op == "const" else other for one, other in zip(shape, array.shape, strict=True)]
    shape[axis] = starts[-1]

    def read(place: Index) -> Term:
        parts: list[tuple[Term, Array, Term]] = []
        for array, start, end in zip(arrays, starts, starts[1:], strict=False):
            inside = arithmetic.below(place[axis], end)
            if inside is not FALSE:
                parts.append((inside, array, start))
            if inside is TRUE:
                break
        result: Term | None = None
        for inside, array, start in reversed(parts):
            item = array.at(*place[:axis], subtract(place[axis], start), *place[axis + 1 :])
            result = item if result is None else ite(inside, item, result)
        assert result is not None
        return result

    return Array(shape, arrays[0].dtype, read)


def sliced(array: Array, axis: int, start: Term, length: Term, step: int = 1) -> Array:
    """A part of an array along an axis."""
    shape = [*array.shape[:axis], length, *array.shape[axis + 1 :]]

    def read(place: Index) -> Term:
        moved = add(start, multiply(number(step), place[axis]))
        return array.at(*place[:axis], moved, *place[axis + 1 :])

    return Array(shape, array.dtype, read)


def matmul(left: Array, right: Array) -> Array:
    """The product of matrices, with the axes in front broadcast."""
    one = left if left.rank > 1 else reshaped(left, [ONE, *left.shape])
    other = right if right.rank > 1 else reshaped(right, [*right.shape, ONE])
    front = broadcast_shape([one.shape[:-2], other.shape[:-2]])
    length = one.shape[-1] if one.shape[-1].op == "const" else other.shape[-2]

    def read(place: Index) -> Term:
        place = (*place, ZERO) if right.rank == 1 else place
        place = (*place[:-1], ZERO, place[-1]) if left.rank == 1 else place
        bound = fresh(length)
        first = one.at(*aligned(place[:-2], one.shape[:-2]), place[-2], bound)
        second = other.at(*aligned(place[:-2], other.shape[:-2]), bound, place[-1])
        return sums.total(bound, multiply(first, second))

    rows = [] if left.rank == 1 else [one.shape[-2]]
    return Array([*front, *rows, *([] if right.rank == 1 else [other.shape[-1]])], left.dtype, read)


def axes_of(array: Array, prefix: str = "x") -> tuple[Term, ...]:
    """An index for each axis, named by its number."""
    return tuple(index(f"{prefix}{axis}", length) for axis, length in enumerate(array.shape))
