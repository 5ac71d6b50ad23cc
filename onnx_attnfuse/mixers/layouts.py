"""Values of one token as LinearAttention takes them, made with as few nodes as there can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, is_constant
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import ELEMENTWISE, RESHAPES, is_standard


def unviewed(value: ir.Value, facts: Facts) -> ir.Value:
    """A value with the same elements in the same order, before all views that keep both."""
    node = value.producer()
    while is_standard(node, "Identity", "Gather", "Transpose", *RESHAPES):
        source = node.inputs[0]
        if source is None or facts.dims(source) is None or not _keeps_order(node, source, facts):
            break
        value, node = source, source.producer()
    return value


def _keeps_order(node: ir.Node, source: ir.Value, facts: Facts) -> bool:
    """Whether a view moves nothing but axes of length 1."""
    dims = facts.dims(source) or ()
    if node.op_type == "Gather":
        axis: int = attribute(node, "axis", 0)
        return dims[axis] == 1 and node.inputs[1] is not None and is_constant(node.inputs[1]) and _count(node, facts) == 1
    if node.op_type != "Transpose":
        return True
    perm: list[int] = attribute(node, "perm", [*reversed(range(len(dims)))])
    moved = [axis for axis in perm if dims[axis] != 1]
    return moved == sorted(moved)


def _count(node: ir.Node, facts: Facts) -> int | None:
    """The number of indices that a Gather is given."""
    dims = None if node.inputs[1] is None else facts.dims(node.inputs[1])
    return None if dims is None else math.prod(dim if isinstance(dim, int) else 0 for dim in dims)


def ungrouped(value: ir.Value, heads: int, facts: Facts) -> tuple[ir.Value, int]:
    """A value of heads that are repeated, before that, with the number of heads there; itself where none are."""
    top = unviewed(value, facts)
    node = top.producer()
    source = node.inputs[0] if is_standard(node, "Expand") else None
    before, after = None if source is None else facts.dims(source), facts.dims(top)
    if source is None or before is None or after is None or len(before) != len(after):
        return top, heads
    wide = [axis for axis, (one, other) in enumerate(zip(before, after, strict=True)) if not facts.same(one, other)]
    count = math.prod(dim for dim in after[1 : wide[0]] if isinstance(dim, int)) if len(wide) == 1 else 0
    repeats = after[wide[0]] if count else 0
    if not isinstance(repeats, int) or before[wide[0]] != 1 or count * repeats != heads:
        return top, heads
    return unviewed(source, facts), count


def narrowed(value: ir.Value, axis: int, builder: Builder) -> ir.Value | None:
    """A value that does not vary along an axis, with length 1 there; None where it may vary."""
    facts, node = builder.facts, value.producer()
    dims, dtype = facts.dims(value), facts.dtype(value)
    if dims is None or dtype is None:
        return None
    if dims[axis] == 1:
        return value
    array = constant_array(value) if is_constant(value) else None
    if array is not None:
        first = np.take(array, [0], axis)
        return builder.constant(np.ascontiguousarray(first)) if bool((array == first).all()) else None
    if is_standard(node, "Expand") and node.inputs[0] is not None:
        return _before_repeats(node.inputs[0], axis, dims, builder)
    if is_standard(node, "Unsqueeze") and node.inputs[0] is not None:
        return _before_unsqueeze(node.inputs[0], axis, dims, builder)
    if not is_standard(node, "Softplus", *ELEMENTWISE):
        return None
    made: list[ir.Value] = []
    for item in node.inputs:
        own = None if item is None else facts.dims(item)
        place = None if own is None else axis - len(dims) + len(own)
        if item is None or place is None:
            return None
        found = item if place < 0 else narrowed(item, place, builder)
        if found is None:
            return None
        made.append(found)
    return builder.node(node.op_type, made, attributes(node), dims=_with_one(dims, axis), dtype=dtype)


def _with_one(dims: Dims, axis: int) -> Dims:
    return (*dims[:axis], 1, *dims[axis + 1 :])


def _before_repeats(source: ir.Value, axis: int, dims: Dims, builder: Builder) -> ir.Value | None:
    own = builder.facts.dims(source)
    if own is None or len(own) != len(dims) or own[axis] != 1:
        return None
    where = [
        place != axis and not builder.facts.same(one, other) for place, (one, other) in enumerate(zip(own, dims, strict=True))
    ]
    return builder.expand(source, _with_one(dims, axis), where) if any(where) else source


def _before_unsqueeze(source: ir.Value, axis: int, dims: Dims, builder: Builder) -> ir.Value | None:
    own = builder.facts.dims(source)
    if own is None:
        return None
    kept = [place for place, dim in enumerate(dims) if dim != 1]
    inner = [place for place, dim in enumerate(own) if dim != 1]
    found = narrowed(source, inner[kept.index(axis)], builder) if len(kept) == len(inner) else None
    return None if found is None else builder.reshape(found, _with_one(dims, axis))


def in_order(value: ir.Value, places: Mapping[int, int], wanted: Sequence[int], builder: Builder) -> ir.Value:
    """A value with its axes in the order of what they are, all others of length 1, and 1 where it has none.

    Args:
        value: The value.
        places: The meaning of each of its axes, by its place; those that are nothing have length 1.
        wanted: The axes of the result.
        builder: Builds the views.
    """
    dims = dims_of(builder, value)
    order = [axis for item in wanted for axis, kind in places.items() if kind == item]
    rest = [axis for axis in range(len(dims)) if axis not in order]
    lengths = {kind: dims[axis] for axis, kind in places.items()}
    long = [axis for axis in order if dims[axis] != 1]
    if long != sorted(long):
        value = builder.transpose(value, [*order, *rest])
    return builder.reshape(unviewed(value, builder.facts), [lengths.get(item, 1) for item in wanted])
