"""Where an element stood before Reshape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from onnx_attnfuse.attention.masks.expression import Expression, Linear, combine, constant, divided, scaled
from onnx_attnfuse.graph.sizes import Dim

At: TypeAlias = "tuple[Expression, ...]"
"""A place, one integer expression for each axis."""


def regrouped(at: At, new: Sequence[Dim], old: Sequence[Dim]) -> At | None:
    """The index in `old` of what stands at index `at` in `new`: axes of equal length first, the rest through a flat index."""
    indices = [item for item, dim in zip(at, new, strict=True) if dim != 1]
    lengths = [dim for dim in new if dim != 1]
    wanted = [dim for dim in old if dim != 1]
    front = 0
    while front < min(len(lengths), len(wanted)) and lengths[front] == wanted[front]:
        front += 1
    back = 0
    while back < min(len(lengths), len(wanted)) - front and lengths[-1 - back] == wanted[-1 - back]:
        back += 1
    middle = _through_flat(
        indices[front : len(indices) - back], lengths[front : len(lengths) - back], wanted[front : len(wanted) - back]
    )
    if middle is None:
        return None
    found = iter([*indices[:front], *middle, *indices[len(indices) - back :]])
    return tuple(constant(0) if dim == 1 else next(found) for dim in old)


def _through_flat(indices: Sequence[Expression], lengths: Sequence[Dim], wanted: Sequence[Dim]) -> list[Expression] | None:
    if not wanted:
        return [] if not indices else None
    flat = constant(0)
    for item, size in zip(indices, lengths, strict=True):
        if not isinstance(item, Linear):
            return None
        flat = combine(scaled(flat, size), item)
    found: list[Expression] = []
    for size in reversed(wanted[1:]):
        parts = divided(flat, size)
        if parts is None:
            return None
        flat, remainder = parts
        found.append(remainder)
    return [flat, *reversed(found)]
