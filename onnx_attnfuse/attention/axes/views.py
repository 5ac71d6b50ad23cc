"""Operators that only rearrange elements, read in both directions.

`upward` goes from a node's output to its first input, `downward` from the input to the output. Both return the value at the other
side with its axes in terms of the same factors, or None where the operator is no view that can be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined, regroup, replaced
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, is_standard, needed
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import RESHAPES
from onnx_attnfuse.graph.rules.reading import axes_of, slice_bounds, slice_length, split_lengths
from onnx_attnfuse.graph.uses import is_copy, is_read_once


@dataclasses.dataclass(frozen=True)
class IndexedValue:
    """A value and its view: the index factors that each of its axes runs over.

    Frozen in name only: `Factor.split` refines a factor in place, so axes are read through `refined`, `refined()` or `leaves`.
    """

    value: ir.Value
    axes: Axes

    def refined(self) -> IndexedValue:
        """The indexed value with its axes in terms of factors that are not split."""
        return IndexedValue(self.value, refined(self.axes))


def upward(indexed: IndexedValue, facts: Facts, selecting: bool = False) -> IndexedValue | None:
    """The value that `indexed` is a view of.

    Args:
        indexed: A value and its axes.
        facts: Shapes.
        selecting: Also go through operators that take a part of their input or repeat it.
    """
    node = indexed.value.producer()
    if not is_standard(node) or not node.inputs or node.inputs[0] is None:
        return None
    rule = (_SELECTING.get(node.op_type) if selecting else None) or _UPWARD.get(node.op_type)
    if rule is None:
        return None
    axes = rule(node, indexed, facts)
    return None if axes is None else IndexedValue(node.inputs[0], axes)


def views_above(indexed: IndexedValue, facts: Facts, selecting: bool = False) -> Iterator[IndexedValue]:
    """A value and those that it is a view of, nearest first; `selecting` is that of `upward`."""
    above: IndexedValue | None = indexed
    while above is not None:
        yield above
        above = upward(above, facts, selecting)


def views_below(indexed: IndexedValue, facts: Facts) -> Iterator[IndexedValue]:
    """A value and the views of it, each followed by those of its own."""
    yield indexed
    for node, place in indexed.value.uses():
        below = None if place else downward(node, indexed.axes, facts)
        if below is not None:
            yield from views_below(below, facts)


def downward(node: ir.Node, axes: Axes, facts: Facts) -> IndexedValue | None:
    """The output of a view whose first input has `axes`."""
    if not is_standard(node) or len(node.outputs) != 1:
        return None
    output = node.outputs[0]
    if is_copy(node):
        return IndexedValue(output, axes)
    if node.op_type == "Transpose":
        perm = attribute(node, "perm") or [*range(len(axes))][::-1]
        return IndexedValue(output, tuple(axes[axis] for axis in perm))
    if node.op_type in RESHAPES:
        dims = facts.dims(output)
        regrouped = None if dims is None else regroup(axes, dims)
        return None if regrouped is None else IndexedValue(output, regrouped)
    return None


def _transpose(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    rank = len(indexed.axes)
    perm: list[int] = attribute(node, "perm") or [*range(rank)][::-1]
    source: list[Axis] = [()] * rank
    for position, axis in enumerate(perm):
        source[axis] = indexed.axes[position]
    return tuple(source)


def _regroup(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    dims = facts.dims(needed(node, 0))
    return None if dims is None else regroup(indexed.axes, dims)


def _copied(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    return indexed.axes if len(node.inputs) == 1 else None


def _own_type(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    """A Cast to the type that a value has, as TorchScript writes one where a module asks for the type of another.

    Outputs of a graph stay: they are known by their names, as the keys of a cache are.
    """
    value = node.inputs[0]
    dtype = None if value is None or indexed.value.is_graph_output() else facts.dtype(value)
    return indexed.axes if dtype is not None and attribute(node, "to") == dtype else None


def uncast(value: ir.Value, facts: Facts, *, alone: bool = False) -> ir.Value:
    """A value before casts to the type that it has; `alone`: before those of what nothing else reads."""
    while is_standard(node := value.producer(), "Cast") and (source := node.inputs[0]) is not None:
        if facts.dtype(source) is None or facts.dtype(source) != facts.dtype(value) or (alone and not is_read_once(source)):
            break
        value = source
    return value


def _expand(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    dims = facts.dims(needed(node, 0))
    if dims is None or len(dims) > len(indexed.axes):
        return None
    return tuple(() if dim == 1 else axis for dim, axis in zip(dims, indexed.axes[len(indexed.axes) - len(dims) :], strict=True))


def _tile(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    repeats = facts.content(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    dims = facts.dims(needed(node, 0))
    if not isinstance(repeats, tuple) or dims is None:
        return None
    source: list[Axis] = []
    for axis, dim, repeat in zip(indexed.axes, dims, repeats, strict=True):
        if repeat == 1:
            source.append(axis)
            continue
        if not isinstance(repeat, (int, sizes.Size)):
            return None
        parts = regroup([axis], [repeat, dim])
        if parts is None:
            return None
        source.append(parts[1])
    return tuple(source)


def _split(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    lengths = split_lengths(node, facts)
    if lengths is None or len(set(lengths)) != 1:
        return None
    axis: int = attribute(node, "axis", 0) % len(indexed.axes)
    fixed = Factor(len(lengths), indexed.value.index())
    return replaced(indexed.axes, axis, (fixed, *indexed.axes[axis]))


def _slice(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    dims = facts.dims(needed(node, 0))
    bounds = None if dims is None else slice_bounds(node, len(dims), facts)
    if dims is None or bounds is None:
        return None
    if all(step == 1 and slice_length(dims[axis], start, end, step) == dims[axis] for axis, (start, end, step) in bounds.items()):
        return indexed.axes
    if len(bounds) != 1:
        return None
    ((axis, (start, end, step)),) = bounds.items()
    total = dims[axis]
    if not isinstance(total, int) or not isinstance(start, int) or not isinstance(end, int) or step != 1:
        return None
    part = range(total)[start:end]
    if not part or total % len(part) or part.start % len(part):
        return None
    return replaced(indexed.axes, axis, (Factor(total // len(part), part.start // len(part)), *indexed.axes[axis]))


def _gather(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    dims = facts.dims(needed(node, 0))
    index = constant_array(node.inputs[1])
    if dims is None or index is None:
        return None
    axis: int = attribute(node, "axis", 0) % len(dims)
    total = dims[axis]
    if not isinstance(total, int) or total == 0:
        return None
    if index.ndim == 0:
        return (*indexed.axes[:axis], (Factor(total, int(index) % total),), *indexed.axes[axis:])
    if index.ndim == 1 and index.size > total and index.size % total == 0:
        return _repeated(indexed, axis, index % total, total)
    return None


def _repeated(indexed: IndexedValue, axis: int, index: Array, total: int) -> Axes | None:
    """A Gather that repeats every element, each in place or all in turn."""
    repeats = index.size // total
    if np.array_equal(index, np.repeat(np.arange(total), repeats)):
        parts, kept = regroup([indexed.axes[axis]], [total, repeats]), 0
    elif np.array_equal(index, np.tile(np.arange(total), repeats)):
        parts, kept = regroup([indexed.axes[axis]], [repeats, total]), 1
    else:
        return None
    return None if parts is None else replaced(indexed.axes, axis, parts[kept])


def _concat(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    """A Concat of one value with itself repeats it."""
    if len(set(node.inputs)) != 1 or node.inputs[0] is None:
        return None
    dims = facts.dims(node.inputs[0])
    axis: int = attribute(node, "axis", 0) % len(indexed.axes)
    if dims is None:
        return None
    parts = regroup([indexed.axes[axis]], [len(node.inputs), dims[axis]])
    return None if parts is None else replaced(indexed.axes, axis, parts[1])


def _squeeze(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    """The axes that are dropped have length 1, whether that is known otherwise or not."""
    rank = facts.rank(needed(node, 0))
    dropped = None if rank is None else axes_of(node, 1, rank, facts)
    if rank is None or not dropped or rank - len(dropped) != len(indexed.axes):
        return _regroup(node, indexed, facts)
    kept = iter(indexed.axes)
    return tuple(() if index in dropped else next(kept) for index in range(rank))


def _unsqueeze(node: ir.Node, indexed: IndexedValue, facts: Facts) -> Axes | None:
    added = axes_of(node, 1, len(indexed.axes), facts)
    if added is None:
        return _regroup(node, indexed, facts)
    return tuple(axis for index, axis in enumerate(indexed.axes) if index not in added)


_Rule = Callable[[ir.Node, IndexedValue, Facts], "Axes | None"]
_UPWARD: dict[str, _Rule] = {
    "Cast": _own_type,
    "Concat": _copied,
    "Flatten": _regroup,
    "Identity": _copied,
    "Reshape": _regroup,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
_SELECTING: dict[str, _Rule] = {
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
}


def is_short(indexed: IndexedValue, facts: Facts) -> bool:
    """Whether an axis of a value may be 1 at run time where the others are longer."""
    dims = facts.dims(indexed.value)
    if dims is None or len(dims) != len(indexed.axes):
        return False
    return any(dim in facts.shorter(length(axis)) for dim, axis in zip(dims, indexed.axes, strict=True))


def varies_along(indexed: IndexedValue, axis: Axis) -> bool:
    """Whether a value has an axis of its own along any factor of `axis`."""
    factors = set(leaves(axis))
    return any(not factors.isdisjoint(leaves(own)) for own in indexed.axes)


def aligned(value: ir.Value | None, axes: Axes, facts: Facts) -> IndexedValue | None:
    """An operand that broadcasts against something laid out as `axes`; None where its shape is not known to."""
    dims = facts.dims(value)
    if value is None or dims is None or len(dims) > len(axes):
        return None
    own = (() if dim == 1 else leaves(axis) for dim, axis in zip(dims, axes[len(axes) - len(dims) :], strict=True))
    return IndexedValue(value, tuple(own))


def lacks_axis(indexed: IndexedValue, axes: Axes) -> bool:
    """Whether an aligned operand lacks an axis, along which it is then repeated."""
    return sum(map(bool, indexed.axes)) < sum(map(bool, axes))
