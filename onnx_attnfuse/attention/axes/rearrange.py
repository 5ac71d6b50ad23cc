"""Emitting a layout: from a value and its factors to the same elements in another order, in as few nodes as it takes.

`plan` decides, `cost` counts, `arrange` emits; `einops` shows the same to a reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, is_short
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.reasons import Refused

_TRANSPOSE, _EXPAND, _SELECT, _RESHAPE = 10.0, 4.0, 3.0, 0.1


def cost(source: IndexedValue, target: Axes) -> float:
    """The cost of bringing `source` into the layout `target`: copies of the tensor, roughly.

    Infinite if `source` runs over a factor that `target` does not have.
    """
    axes, target = refined(source.axes), refined(target)
    present = {leaf for axis in axes for leaf in axis if leaf.position is None}
    wanted = [leaf for axis in target for leaf in axis]
    if not present <= set(wanted):
        return float("inf")
    total = 0.0
    if any(leaf.position is not None for axis in axes for leaf in axis):
        total += _SELECT
    if len(present) < len(wanted):
        total += _EXPAND
    kept = [leaf for leaf in wanted if leaf in present]
    if kept != [leaf for axis in axes for leaf in axis if leaf.position is None]:
        total += _TRANSPOSE
    return total if axes == target else total + _RESHAPE


def is_view(source: IndexedValue, target: Axes) -> bool:
    """Whether the elements of `source` lie as `target` has them, so that nothing is copied."""
    return cost(source, target) <= _RESHAPE


def arrange(builder: Builder, source: IndexedValue, target: Axes) -> ir.Value:
    """Emits the nodes that bring `source` into the layout `target`; a factor that the source lacks is repeated.

    Raises:
        Refused: The source runs over a factor that the target has no place for.
    """
    target = refined(target)
    source = spread(builder, source)
    value, axes = _select(builder, source.value, refined(source.axes))
    wanted = [leaf for axis in target for leaf in axis]
    present = {leaf for axis in axes for leaf in axis}
    if not present <= set(wanted):
        raise Refused("foreign-axis", f"'{source.value.name}' has an axis that the attention does not have")
    kept = [leaf for leaf in wanted if leaf in present]
    if kept != [leaf for axis in axes for leaf in axis]:
        value, axes = _transpose(builder, value, axes, kept)
    if len(kept) < len(wanted):
        value = _repeat(builder, value, target, present)
    return builder.reshape(value, [length(axis) for axis in target])


def spread(builder: Builder, indexed: IndexedValue) -> IndexedValue:
    """A value expanded to full length along axes that may be 1 at run time, where the source broadcasts."""
    dims = builder.facts.dims(indexed.value)
    if dims is None or not is_short(indexed, builder.facts):
        return indexed
    full = [length(axis) for axis in indexed.axes]
    where = [dim in builder.facts.shorter(size) for dim, size in zip(dims, full, strict=True)]
    lengths = [size if marked else dim for dim, size, marked in zip(dims, full, where, strict=True)]
    return IndexedValue(builder.expand(indexed.value, lengths, where), indexed.axes)


def _select(builder: Builder, value: ir.Value, axes: Axes) -> tuple[ir.Value, Axes]:
    """Takes the parts of packed axes that fixed factors point at."""
    while True:
        found = next(((i, j) for i, axis in enumerate(axes) for j, leaf in enumerate(axis) if leaf.position is not None), None)
        if found is None:
            return value, axes
        index, place = found
        axis = axes[index]
        if place > 0:
            axes = (*axes[:index], axis[:place], axis[place:], *axes[index + 1 :])
            value = builder.reshape(value, [length(part) for part in axes])
            continue
        fixed, rest = axis[0], length(axis[1:])
        if not isinstance(rest, int):
            axes = (*axes[:index], axis[:1], axis[1:], *axes[index + 1 :])
            value = builder.reshape(value, [length(part) for part in axes])
            continue
        assert fixed.position is not None
        value = builder.slice(value, index, fixed.position * rest, (fixed.position + 1) * rest)
        axes = replaced(axes, index, axis[1:])


def _transpose(builder: Builder, value: ir.Value, axes: Axes, order: Sequence[Factor]) -> tuple[ir.Value, Axes]:
    """Splits axes where their factors part ways, then permutes."""
    position = {leaf: index for index, leaf in enumerate(order)}
    pieces: list[Axis] = []
    for axis in axes:
        start = 0
        for index in range(1, len(axis)):
            if position[axis[index]] != position[axis[index - 1]] + 1:
                pieces.append(axis[start:index])
                start = index
        pieces.append(axis[start:])
    value = builder.reshape(value, [length(piece) for piece in pieces])
    last = -1.0
    keys: list[float] = []
    for piece in pieces:
        last = float(position[piece[0]]) if piece else last + 1e-3
        keys.append(last)
    perm = sorted(range(len(pieces)), key=keys.__getitem__)
    return builder.transpose(value, perm), tuple(pieces[index] for index in perm)


def _repeat(builder: Builder, value: ir.Value, target: Axes, present: set[Factor]) -> ir.Value:
    """Gives every run of present or lacking factors an axis of its own and expands the lacking ones."""
    runs: list[tuple[Axis, bool]] = []
    for axis in target:
        if not axis:
            runs.append(((), True))
        for index, leaf in enumerate(axis):
            has = leaf in present
            if index and runs[-1][1] == has:
                runs[-1] = ((*runs[-1][0], leaf), has)
            else:
                runs.append(((leaf,), has))
    value = builder.reshape(value, [length(run) if has else 1 for run, has in runs])
    return builder.expand(value, [length(run) for run, _ in runs], [not has for _, has in runs])


def einops(source: IndexedValue, target: Axes, names: Mapping[Factor, str]) -> str | None:
    """The rearrangement as an einops expression, or None if there is none to speak of."""
    axes, target = refined(source.axes), refined(target)
    if axes == target:
        return None
    return f"{_write(axes, names)} -> {_write(target, names)}"


def _write(axes: Axes, names: Mapping[Factor, str]) -> str:
    words: list[str] = []
    for axis in axes:
        parts = [names.get(leaf, "?") if leaf.position is None else f"{leaf.size}[{leaf.position}]" for leaf in leaves(axis)]
        words.append("1" if not parts else parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    return " ".join(words)
