"""Operands of a captured graph brought into the layout of a call, and the result back into the original's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from onnx_attnfuse.attention.axes.factors import Axes, Factor, length, refined
from onnx_attnfuse.attention.axes.rearrange import cost
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import Source
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.training.pytorch import runtime_calls

Emit = Callable[..., fx.Node]
"""Adds a call of a function: `emit(function, *arguments)`."""


def arrange(emit: Emit, node: fx.Node, axes: Axes, target: Axes, operands: tuple[fx.Node, fx.Node] | None = None) -> fx.Node:
    """Brings a tensor into another layout; axes that it lacks have length 1.

    Args:
        emit: Adds a call.
        node: The tensor.
        axes: Its axes.
        target: The axes that are wanted.
        operands: Queries and keys, as long as which a mask is repeated where it lacks a part of an axis; None: it lacks none.

    Raises:
        Refused: An axis is foreign, lacks a part, or is a product of lengths that are not known.
    """
    axes, target = refined(axes), refined(target)
    if axes == target:
        return node
    present = [leaf for axis in axes for leaf in axis]
    if any(leaf.position is not None for leaf in present):
        raise Refused("inner-value", f"'{node.name}' is read as a part of a packed tensor")
    wanted = [leaf for axis in target for leaf in axis if leaf in present]
    if len(wanted) != len(present) or len(set(present)) != len(present):
        raise Refused("foreign-axis", f"'{node.name}' has an axis that the attention does not have")
    whole = tuple(axis if not set(axis).isdisjoint(present) else () for axis in target)
    is_short = any(leaf not in present for axis in whole for leaf in axis)
    if is_short and operands is None:
        raise Refused("foreign-axis", f"'{node.name}' runs over a part of an axis only")
    parts: list[tuple[int | None, ...]] = []
    for axis in axes:
        sizes = tuple(map(_known, axis))
        if len(sizes) > 1 and sizes.count(None) > 1:
            raise Refused("unknown-length", f"an axis of '{node.name}' is a product of lengths that are not known")
        parts.append(sizes)
    order = tuple(present.index(leaf) for leaf in wanted)
    if not is_short:
        return emit(runtime_calls.arranged, node, tuple(parts), order, tuple(map(len, whole)))
    groups = tuple(int(leaf in present) for axis in whole for leaf in axis or (None,))
    pieces = tuple(tuple(0 if leaf in present else _known(leaf) for leaf in axis) for axis in whole)
    if any(axis.count(None) > 1 for axis in pieces):
        raise Refused("unknown-length", f"'{node.name}' is repeated as often as a product of lengths that are not known")
    fine = emit(runtime_calls.arranged, node, tuple(parts), order, groups)
    return emit(runtime_calls.repeated, fine, pieces, *(operands or () if any(None in axis for axis in pieces) else ()))


def _known(leaf: Factor) -> int | None:
    return leaf.size if isinstance(leaf.size, int) else None


def usable(operand: tuple[Source, ...], known: dict[Any, fx.Node]) -> list[tuple[fx.Node, Axes]]:
    """The tensors of a captured graph that an operand is a view of, without a factor or a rotation between, nearest first."""
    found: list[tuple[fx.Node, Axes]] = []
    for source in operand:
        if source.factor != 1.0 or source.rotary is not None:
            continue
        node = known.get(source.indexed.value)
        if node is not None and not any(leaf.position is not None for axis in refined(source.indexed.axes) for leaf in axis):
            found.append((node, source.indexed.axes))
    return found


def end(readings: tuple[IndexedValue, ...], known: dict[Any, fx.Node], made: Axes) -> tuple[fx.Node, Axes]:
    """The tensor to replace: a reading of the result that a new one is brought into at least cost.

    Raises:
        Refused: No reading is a tensor of the captured graph.
    """
    found = [(known[item.value], item) for item in readings if item.value in known]
    if not found:
        raise Refused("inner-value", "the result is not a tensor of the captured graph")
    node, item = min(found, key=lambda pair: cost(IndexedValue(pair[1].value, made), pair[1].axes))
    return node, item.axes


def shared_heads(axes: Axes, heads: Axes) -> Axes | None:
    """The heads of keys where several heads of queries share one: the outer ones of `heads`; None where they share none.

    Args:
        axes: The axes of the keys as a tensor has them.
        heads: The axis of heads alone.
    """
    present = {leaf for axis in refined(axes) for leaf in axis}
    (inside,) = refined(heads)
    own = tuple(leaf for leaf in inside if leaf in present)
    if len(own) == len(inside):
        return heads
    return (own,) if inside[: len(own)] == own and all(isinstance(length([leaf]), int) for leaf in inside) else None
