"""A mask of float32 for an operator in a half type, where nothing is lost by it.

Sources that add their masks in float32, as mixed precision does, make them of numbers of the half type and of fills. A number is
itself in the half type; a fill that swallows any score becomes the lowest number, and what rows without a key need is seen to
elsewhere (`fully_masked_rows`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, constant_array, is_standard
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS

_VIEWS = REARRANGES | REPEATS | {"Gather", "Slice"}
_JOINING = frozenset(["Add", "Concat", "Max", "Min"])
_MAX_VALUES_SEEN = 64


def lowest_of(value: ir.Value, dtype: ir.DataType, swallows: float, facts: Facts) -> float | None:
    """How low a wider value may be, if all it is made of is numbers of a half type, or low enough to swallow any score.

    Args:
        value: The value to narrow.
        dtype: The half type.
        swallows: From here down a number swallows any score.
        facts: Facts about the graph.

    Returns:
        How low it may be at least, as far as constants and sums tell, 0 or less; None if something else is in it.
    """
    low, pending, seen = 0.0, [value], {value}
    for item in pending:
        if len(seen) > _MAX_VALUES_SEEN:
            return None
        read = _read(item, dtype, facts)
        if read is None:
            numbers = _numbers(item, facts)
            if numbers is None or not _are_of(numbers, dtype, swallows):
                return None
            low = min(low, float(numbers.min(initial=0)))
            continue
        node = item.producer()
        if read and node is not None and node.op_type == "Add":
            low = min(low, -2 * largest(dtype))
        fresh = [part for part in read if part not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return low


def _read(value: ir.Value, dtype: ir.DataType, facts: Facts) -> list[ir.Value] | None:
    """The values that a value takes its numbers from; none if it is of the half type already, None if unknown or constant."""
    node = value.producer()
    if facts.dtype(value) == dtype:
        return []
    if not is_standard(node):
        return None
    parts = [part for part in node.inputs if part is not None]
    if node.op_type == "Cast":
        source = facts.dtype(parts[0])
        return [] if source in {dtype, ir.DataType.BOOL} else [parts[0]] if source == ir.DataType.FLOAT else None
    if node.op_type == "Where":
        return parts[1:]
    if node.op_type in _JOINING:
        return parts
    return parts[:1] if node.op_type in _VIEWS else None


def _numbers(value: ir.Value, facts: Facts) -> Array | None:
    array = constant_array(value)
    number = facts.number(value) if array is None else None
    return np.asarray(number) if number is not None else array


def _are_of(numbers: Array, dtype: ir.DataType, swallows: float) -> bool:
    kept = numbers[numbers > swallows].astype(np.float64)
    return bool((kept.astype(dtype.numpy()).astype(np.float64) == kept).all())


def narrowed(builder: Builder, value: ir.Value, dtype: ir.DataType, low: float) -> ir.Value:
    """The value in the half type; numbers below it become its lowest, -inf stays.

    Args:
        builder: The builder.
        value: A value that `lowest_of` has an answer for.
        dtype: The half type.
        low: That answer.
    """
    wide = builder.facts.dtype(value)
    if low >= -largest(dtype) or wide is None:
        return builder.cast(value, dtype)
    bounded = builder.elementwise("Max", [value, builder.scalar(-largest(dtype), wide)])
    finite = builder.elementwise("GreaterOrEqual", [value, builder.scalar(-largest(wide), wide)])
    return builder.cast(builder.elementwise("Where", [finite, bounded, value]), dtype)
