"""Constant tables that are rules in disguise: GPT-2's triangle of ones, a band, everything allowed, positions counted up."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.masks.expression import (
    Element,
    Expression,
    Linear,
    NonZero,
    Number,
    Truth,
    at_most_zero,
    bounds,
    choice,
    combine,
    conjunction,
    constant,
    scaled,
)
from onnx_attnfuse.attention.masks.reshape_index import At
from onnx_attnfuse.graph.constants import constant_array, is_constant
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Size

_TABLE = 4096
_MATRIX = 1 << 24
_ROWS_AND_COLUMNS = 2


def element_of(value: ir.Value, at: At, facts: Facts) -> Expression | None:
    """The element of a constant at an index, where it is known; None for other values."""
    content = facts.content(value) if not at else None
    if isinstance(content, bool):
        return Truth(content)
    if isinstance(content, (int, Size)):
        return constant(content)
    number = facts.number(value)
    if number is None:
        return _table(value, at, facts)
    return literal(number, facts.dtype(value))


def unnamed_element(value: ir.Value, at: At, facts: Facts) -> Expression:
    """The element of a constant whose rule is not known: a truth value as 1 or 0 where it holds no other numbers.

    Of constants that hold the same it is that of the first that was asked for: exporters write a table once for each place.
    """
    array = constant_array(value, limit=_MATRIX)
    if array is None:
        return Element(value, at)
    known = facts.once("constants by content", dict[tuple[object, ...], ir.Value])
    key = str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    if key not in known or not known[key].uses():  # what is rewritten may have lost it since
        known[key] = value
    element = Element(known[key], at)
    if array.dtype == np.bool_ or not np.isin(array, [0, 1]).all():
        return element
    dtype = facts.dtype(value)
    return choice(NonZero(element), literal(1, dtype), literal(0, dtype))


def _table(value: ir.Value, at: At, facts: Facts) -> Expression | None:
    """One entry of a small constant at a known index, or an entry of a small content vector."""
    forms = [item for item in at if isinstance(item, Linear)]
    places = [item.offset for item in forms if not item.terms and isinstance(item.offset, int)]
    if len(forms) == len(at) > len(places) + 2 and is_constant(value):
        fixed = _without_repeats(value, forms)
        return None if fixed is None else _table(value, fixed, facts)
    if len(forms) == len(at) == len(places) + 2:
        return _rule(value, forms, facts)
    if len(forms) == len(at) == len(places) + 1:
        return _count(value, forms)
    if len(places) != len(at):
        return None
    content = facts.content(value)
    if isinstance(content, tuple) and len(places) == 1 and -len(content) <= places[0] < len(content):
        item = content[places[0]]
        return constant(item) if isinstance(item, (int, Size)) and not isinstance(item, bool) else None
    array = constant_array(value, limit=_TABLE)
    return None if array is None else literal(float(array[tuple(places)]), facts.dtype(value))


def _without_repeats(value: ir.Value, at: Sequence[Linear]) -> tuple[Linear, ...] | None:
    """An index into a constant that begins with the same over and over, as with a matrix for each head; None if it does not."""
    array = constant_array(value, limit=_MATRIX)
    if array is None or array.ndim < _ROWS_AND_COLUMNS or array.shape[0] == 0:
        return None
    parts = array.reshape(-1, *array.shape[-_ROWS_AND_COLUMNS:])
    if not all(np.array_equal(parts[0], part) for part in parts[1:]):
        return None
    return (*(constant(0) for _ in at[:-_ROWS_AND_COLUMNS]), *at[-_ROWS_AND_COLUMNS:])


def _rule(value: ir.Value, at: Sequence[Linear], facts: Facts) -> Expression | None:
    """A matrix in a constant table of two different values, if it writes out a rule where each is."""
    array = constant_array(value, limit=_MATRIX) if is_constant(value) else None
    moving = [axis for axis, item in enumerate(at) if item.terms or not isinstance(item.offset, int)]
    if array is None or len(moving) != 2:
        return None
    fixed = tuple(slice(None) if axis in moving else _known(item) for axis, item in enumerate(at))
    matrix = np.asarray(array[fixed])
    if matrix.size == 0:
        return None
    dtype, high, low = facts.dtype(value), matrix.max(), matrix.min()
    if not np.isin(matrix, [high, low]).all():
        return None
    rule = as_rule(matrix == high, at[moving[0]], at[moving[1]])
    return None if rule is None else choice(rule, literal(float(high), dtype), literal(float(low), dtype))


def _count(value: ir.Value, at: Sequence[Linear]) -> Expression | None:
    """A row of a constant of integers, if it counts."""
    array = constant_array(value, limit=_MATRIX) if is_constant(value) else None
    (axis,) = (axis for axis, item in enumerate(at) if item.terms or not isinstance(item.offset, int))
    fixed = tuple(slice(None) if place == axis else _known(item) for place, item in enumerate(at))
    return None if array is None else as_count(np.asarray(array[fixed]), at[axis])


def _known(place: Linear) -> int:
    assert isinstance(place.offset, int)
    return place.offset


def literal(number: float, dtype: ir.DataType | None) -> Expression:
    """A number of an element type as an expression."""
    if dtype == ir.DataType.BOOL:
        return Truth(bool(number))
    if dtype in {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT8}:
        return constant(int(number))
    return Number(number)


def as_rule(table: npt.NDArray[np.bool_], row: Linear, column: Linear) -> Expression | None:
    """The rule that a two-dimensional table of truth values writes out, as a function of row and column; None if there is none.

    Only bands around the diagonal are tried: `low <= column - row <= high`.
    """
    if table.ndim != 2 or table.size < 4:
        return None
    rows, columns = table.shape
    shifts: npt.NDArray[np.int_] = np.indices(table.shape)[1] - np.indices(table.shape)[0]
    allowed = shifts[table]
    if allowed.size == 0:
        return None
    low, high = int(allowed.min()), int(allowed.max())
    if not np.array_equal(table, (shifts >= low) & (shifts <= high)):
        return None
    distance = combine(column, row, -1)
    parts: list[Expression] = []
    if high < columns - 1:
        parts.append(at_most_zero(combine(distance, constant(high), -1)))
    if low > 1 - rows:
        parts.append(at_most_zero(combine(constant(low), distance, -1)))
    return conjunction(parts)


def as_count(row: npt.NDArray[np.generic], place: Linear) -> Linear | None:
    """The number at a place of a row of integers that counts in even steps, as a function of the place; None where it does not.

    A place below 0 would be one from the end, so it must be known to be none.
    """
    low, _ = bounds(place)
    if row.ndim != 1 or row.size < 2 or row.dtype.kind not in "iu" or not isinstance(low, int) or low < 0:
        return None
    steps: set[int] = set(np.diff(row.astype(np.int64)).tolist())
    return combine(constant(int(row[0])), scaled(place, steps.pop())) if len(steps) == 1 else None
