"""The number of positions in a cache, by the mask: its length is that of the past and the new positions together.

The past as an input is a buffer, so its own length says nothing any more. Whoever asked for it gets that of `earlier` instead,
the part of the mask that belongs to the past.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.edit import answer_shapes
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.sweep import sweep

_INT, _SMALL = ir.DataType.INT64, ir.DataType.INT32
Padding = Literal["unknown", "anywhere", "after", "none"]
"""The zeros of a mask: unknown, as it gives lengths only; anywhere among the positions; after the tokens of a prompt; none."""
_MAX_TAKES_INTEGERS = 12
"""The opset from which on it does."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths of a batch, as values of the graph."""

    earlier: ir.Value
    """The mask of the past, (b, past)."""
    new: ir.Value
    """The mask of the new positions, ones and zeros, (b, s) int32."""
    last: ir.Value
    """The place of the last key in the buffer for every entry, the new ones all counted, (b) int32."""
    total: ir.Value
    """How long past and new positions are together, a scalar int32."""
    rows: Dim
    """The length of past and new positions as a size."""
    readers: frozenset[ir.Node]
    """The nodes that read the mask for all this."""
    counts_ones: bool
    """Whether the place of the last key is given by the number of ones, wherever they are."""

    def ends_anywhere(self, mask: ir.Value) -> bool:
        """Whether zeros may follow the text of the mask, as nothing asks where it ends or how many positions are past."""
        return self.counts_ones and {node for node, _ in mask.uses()} <= self.readers and not self.earlier.uses()


def read_lengths(
    builder: Builder, mask: ir.Value, batch: Dim, new: Dim, past: Size, padding: Padding, *, on_host: bool = False
) -> Lengths:
    """Emits the lengths, and makes the mask what the number of earlier positions is read from.

    Only real tokens of the past count, as only these stay in the buffer. All new ones count: where there is padding among them it
    follows the real ones, which do not see it, and the next ones take its place. Padding that is in a prompt alone, or
    nowhere, leaves a rule that does not ask where the text ends: all ones of the mask count, and in a prompt as many as are new.

    Args:
        builder: The builder.
        mask: The input (b, past + s).
        batch: The number of entries.
        new: The number of new positions.
        past: The symbol for the number of earlier ones.
        padding: Where the mask has zeros; where it tells lengths only, they count too.
        on_host: Sizes lie where the model runs, so that a size is no copy to a device.
    """
    facts, dtype, others = builder.facts, builder.facts.dtype(mask), {node for node, _ in mask.uses()}
    start, end, axis = builder.shape([new * -1]), builder.constant([np.iinfo(np.int64).max]), builder.constant([1])
    earlier = builder.node("Slice", [mask, builder.constant([0]), start, axis], dims=[batch, past], dtype=dtype)
    facts.origins[past.atoms[0].key] = (earlier, 1)
    total = builder.cast(builder.reshape(_length(builder, mask), []), _SMALL)
    kept = builder.cast(mask, ir.DataType.BOOL)
    ones = builder.cast(kept, _SMALL)
    current = builder.node("Slice", [ones, start, end, axis], dims=[batch, new], dtype=_SMALL)
    counted = builder.reduce("ReduceSum", ones, [1], keep=False)  # where the mask lies: a length would be copied to a GPU
    counts_ones = padding == "none" or (padding == "after" and builder.opset >= _MAX_TAKES_INTEGERS)
    if not counts_ones:
        rest = builder.constant(np.asarray(1, np.int32))
        zeros = builder.elementwise("Sub", [rest, ones if padding == "unknown" else current])
        uncounted = builder.reduce("ReduceSum", zeros, [1], keep=False)
        counted = builder.elementwise("Add", [counted, uncounted])
    elif padding == "after":
        counted = builder.elementwise("Max", [counted, _width(builder, current, new, on_host=on_host)])
    last = builder.elementwise("Sub", [counted, builder.constant(np.asarray(1, np.int32))])
    readers = frozenset(node for node, _ in mask.uses() if node not in others)
    return Lengths(earlier, current, last, total, facts.fresh(kept, 1), readers, counts_ones)


def _width(builder: Builder, current: ir.Value, new: Dim, *, on_host: bool) -> ir.Value:
    """The number of new positions, int32: one for all entries, or for each and counted where the mask lies."""
    if isinstance(new, int):
        return builder.constant(np.asarray(new, np.int32))
    if on_host:
        return builder.cast(builder.shape([new]), _SMALL)
    every = builder.elementwise("Equal", [current, current])
    return builder.reduce("ReduceSum", builder.cast(every, _SMALL), [1], keep=False)


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
