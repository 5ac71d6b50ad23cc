"""Constant tables that are rules in disguise: GPT-2's triangle of ones, a band, everything allowed, positions counted up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_attnfuse.attention.masks.expression import (
    Expression,
    Linear,
    at_most_zero,
    bounds,
    combine,
    conjunction,
    constant,
    scaled,
)


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
