"""Maxima of scores that are subtracted from them, which a softmax does not see where they are one number for all keys."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, upward, varies_along
from onnx_attnfuse.attention.match.steps import Shifted
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts

_PASSES = ("Cast", "Expand", "Identity", "Reshape", "Unsqueeze")


def maximum_of(scores: ir.Value, value: ir.Value | None, facts: Facts) -> tuple[ir.Node, ...]:
    """The nodes that make `value` a maximum of `scores`, the one that reduces last; none if it is something else.

    Along which axes is not looked at: see `is_one_for_all_keys`.
    """
    nodes: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        nodes.append(node)
        if is_standard(node, "ReduceMax"):
            return tuple(nodes) if node.inputs[0] is scores else ()
        value = _before(node, facts)
    return ()


def largest_of(step: Shifted, axes: Axes, facts: Facts) -> IndexedValue | None:
    """The maximum that is subtracted from scores laid out as `axes`, as it was reduced, before it is repeated for all keys."""
    own = aligned(step.largest, axes, facts)
    found = None if own is None else IndexedValue(step.largest, own)
    while found is not None and (node := found.value.producer()) is not None and not is_standard(node, "ReduceMax"):
        view, before = upward(found, facts), _before(node, facts)
        found = view or (None if before is None else IndexedValue(before, found.axes))
    return found


def is_one_for_all_keys(step: Shifted, axes: Axes, key_axis: Axis, facts: Facts) -> bool:
    """Whether the maximum that is subtracted from scores laid out as `axes` is the same for all keys of a row."""
    largest = largest_of(step, axes, facts)
    return largest is not None and not varies_along(largest, key_axis)


def _before(node: ir.Node, facts: Facts) -> ir.Value | None:
    """The value that a node repeats, casts, or takes the maximum of with -inf, as JAX begins one with."""
    if is_standard(node, "Max") and len(node.inputs) == 2:
        for value, other in (node.inputs, node.inputs[::-1]):
            if other is not None and facts.number(other) == -math.inf:
                return value
    return node.inputs[0] if is_standard(node, *_PASSES) else None
