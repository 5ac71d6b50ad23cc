"""Constant tables that are rules in disguise: GPT-2's triangle of ones, a band, everything allowed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_attnfuse.attention.masks.expression import Expression, Linear, at_most_zero, combine, conjunction, constant


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
