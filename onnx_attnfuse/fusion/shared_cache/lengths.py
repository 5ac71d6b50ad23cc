"""How many positions a cache holds, told by the mask: its length is that of the past and the new positions together.

The past as an input is a buffer, so its own length says nothing any more. Whoever asked for it gets that of `earlier` instead,
the part of the mask that belongs to the past.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.edit import answer_shapes
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.sweep import sweep

_INT, _SMALL = ir.DataType.INT64, ir.DataType.INT32


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of a batch, as values of the graph."""

    earlier: ir.Value
    """The mask of the past, (b, past)."""
    new: ir.Value
    """The mask of the new positions, (b, s)."""
    last: ir.Value
    """The place of the last key in the buffer for every entry, the new ones all counted, (b) int32."""
    total: ir.Value
    """How long past and new positions are together, a scalar int32."""


def read_lengths(builder: Builder, mask: ir.Value, batch: Dim, new: Dim, past: Size, *, padded: bool) -> Lengths:
    """Emits the lengths, and makes the mask what the number of earlier positions is read from.

    Only real tokens of the past count, as only these stay in the buffer. All new ones count: where there is padding among them it
    lies behind the real ones, which do not see it, and the next ones take its place.

    Args:
        builder: What to build with.
        mask: The input (b, past + s).
        batch: The number of entries.
        new: The number of new positions.
        past: The symbol for the number of earlier ones.
        padded: The mask tells tokens from padding; else it only tells lengths.
    """
    facts, dtype = builder.facts, builder.facts.dtype(mask)
    start, end, axis = builder.shape([new * -1]), builder.constant([np.iinfo(np.int64).max]), builder.constant([1])
    earlier = builder.node("Slice", [mask, builder.constant([0]), start, axis], dims=[batch, past], dtype=dtype)
    current = builder.node("Slice", [mask, start, end, axis], dims=[batch, new], dtype=dtype)
    facts.origins[past.atoms[0].key] = (earlier, 1)
    total = builder.cast(builder.reshape(_length(builder, mask), []), _SMALL)
    uncounted = _counted(builder, current if padded else mask, "Not")
    counted = builder.elementwise("Add", [_counted(builder, mask), uncounted], _SMALL)
    last = builder.elementwise("Sub", [counted, builder.constant(np.asarray(1, np.int32))], _SMALL)
    return Lengths(earlier, current, last, total)


def _counted(builder: Builder, mask: ir.Value, *changes: str) -> ir.Value:
    """How many positions of a mask are 1, or 0 where it is changed by Not, for each entry, (b) int32.

    Counted where the mask lies, as a length would have to be copied to a GPU. There the mask of an empty past cannot be summed.
    """
    kept = builder.cast(mask, ir.DataType.BOOL)
    for change in changes:
        kept = builder.elementwise(change, [kept], ir.DataType.BOOL)
    return builder.reduce("ReduceSum", builder.cast(kept, _SMALL), [1], keep=False)


def answer_for_past(builder: Builder, past: ir.Value) -> None:
    """Gives whoever asks for the length of a past the number of earlier positions, also where a copy of it is asked."""
    for node in [node for node, _ in past.uses() if is_copy(node)]:
        copy = node.outputs[0]
        answer_for_past(builder, copy)
        copy.replace_all_uses_with(past)
        sweep([copy])
    answer_shapes(past, builder)


def is_copy(node: ir.Node) -> bool:
    """Whether a node gives its only input."""
    return is_standard(node, "Identity") or (is_standard(node, "Concat") and len(node.inputs) == 1)


def _length(builder: Builder, mask: ir.Value) -> ir.Value:
    """The second axis of the mask, as it is."""
    if builder.opset >= 15:
        return builder.node("Shape", [mask], {"start": 1, "end": 2}, dims=[1], dtype=_INT)
    return builder.slice(builder.node("Shape", [mask], dims=[2], dtype=_INT), 0, 1, 2)
