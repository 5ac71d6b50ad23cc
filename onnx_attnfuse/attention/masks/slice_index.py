"""The index of an element of a slice in what it was cut out of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.masks.expression import Linear, combine, constant, scaled
from onnx_attnfuse.attention.masks.reshape_index import At
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import from_start, slice_bounds, span_of
from onnx_attnfuse.graph.sizes import Dim


def cut_from(
    node: ir.Node, dims: Sequence[Dim], at: At, facts: Facts, told: Callable[[ir.Value, Dim], Linear | None]
) -> At | None:
    """The index in the input of a Slice of the element at an index of its result; None where it cannot be told.

    Args:
        node: The Slice.
        dims: The shape of its input.
        at: The index in the result.
        facts: What is known of its bounds.
        told: Reads a start that is told at run time as a place in an axis of some length, if it is inside.
    """
    bounds, inner = slice_bounds(node, len(dims), facts), list(at)
    if bounds is None:
        found = span_of(node, facts)
        if found is None:
            return None
        axis, start, _ = found
        first, place = told(start, dims[axis]), at[axis]
        if first is None or not isinstance(place, Linear):
            return None
        inner[axis] = combine(place, first)
        return tuple(inner)
    for axis, (start, _, step) in bounds.items():
        place, begin = inner[axis], from_start(start, dims[axis])
        if not isinstance(place, Linear) or step < 1 or begin is None:
            return None
        inner[axis] = combine(scaled(place, step), constant(begin))
    return tuple(inner)
