"""Which of an attention's batch factors are heads."""

from __future__ import annotations

from collections.abc import Iterable

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue


def find_heads(batch_axis: Axis, channel_axis: Axis, indexed: Iterable[IndexedValue], scores: Axes) -> Axis:
    """The factors that are heads: those which share an axis with the channels somewhere, else the innermost of the batch axes.

    Args:
        batch_axis: All factors that are neither rows nor columns nor channels.
        channel_axis: The factors of the channels of queries, keys and values.
        indexed: Operands and results in all their layouts, those to be believed first, first.
        scores: The axes of the scores.
    """
    batch = leaves(batch_axis)
    channels = set(leaves(channel_axis))
    for candidate in indexed:
        for axis in candidate.axes:
            parts = leaves(axis)
            heads = [part for part in parts if part in batch]
            if heads and not channels.isdisjoint(parts) and all(isinstance(head.size, int) for head in heads):
                return tuple(part for part in batch if part in heads)
    inner = [leaves(axis) for axis in scores if leaves(axis) and set(leaves(axis)) <= set(batch)]
    if len(inner) > 1 and all(isinstance(part.size, int) for part in inner[-1]):
        return inner[-1]
    return ()
