"""Packing into a number of rows that is fixed, as a captured graph needs: tokens first, after them places of padding.

Where a batch has more tokens than rows, all that is restored is NaN: nothing is lost without a sign.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.fusion.packing.pad_unpad import Rows
from onnx_attnfuse.fusion.packing.token_axes import Marks, Tokens, as_axes, others
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.packed import Packing

_TRUTH, _INDEX = ir.DataType.BOOL, ir.DataType.INT32


class UnpadFixed(Rows):
    """By rows whose number is fixed; nothing waits for a GPU."""

    packing: Packing | None
    """Further inputs of PackedMultiHeadAttention, where it was asked for."""

    def __init__(self, builder: Builder, tokens: Tokens, keep: ir.Value, room: int | None) -> None:
        """Builds the index of so many rows, or of all.

        Raises:
            Refused: The sizes of the batch are no numbers.
        """
        super().__init__(builder, tokens)
        if not isinstance(tokens.batch, int) or not isinstance(tokens.length, int):
            raise Refused("open-size", "a fixed number of rows wants a batch of fixed sizes")
        shape, line = (tokens.batch, tokens.length), np.arange(tokens.batch * tokens.length)
        self._room, self.packing = min(room or line.size, line.size), None
        kept = builder.cast(keep, _INDEX)
        lengths = builder.reduce("ReduceSum", kept, [1])
        self._begins = self._running(lengths, 0)
        self._total = builder.reduce("ReduceSum", lengths, [0])
        before = builder.elementwise("Add", [self._running(kept, 1), self._begins])
        places = self._number(line.reshape(shape))
        paddings = builder.elementwise("Sub", [places, before])
        after = builder.elementwise("Add", [paddings, self._total])
        to = builder.reshape(builder.elementwise("Where", [keep, before, after]), [line.size])
        inputs = [self._number(0 * line), to, self._number(line)]
        self._order = builder.node("ScatterElements", inputs, {"axis": 0})
        self.index = builder.slice(self._order, 0, 0, self._room)
        self._offset = builder.reshape(self._order, list(shape))
        fits = builder.elementwise("LessOrEqual", [self._total, self._number([self._room])])
        self._known = builder.reshape(builder.elementwise("And", [keep, fits]), [*shape, 1])
        self._fits = builder.reshape(fits, [1, 1, 1])

    def filled(self, packed: ir.Value, like: ir.Value, marks: Marks) -> ir.Value:
        """A packed value as `like` is laid out, with rows of other places, or 0, at the places of padding."""
        build, dims = self.builder, self.builder.facts.dims(like)
        assert dims is not None
        axes, batch, rows = as_axes(marks, dims, self.tokens)
        channels = others(marks, dims)
        flat = build.reshape(packed, [self._room, sizes.product(channels)])
        whole: Axes = ((batch,), (rows,), tuple(leaf for axis in others(marks, axes) for leaf in axis))
        return arrange(build, IndexedValue(self._put_back(flat), whole), axes)

    def _put_back(self, packed: ir.Value) -> ir.Value:
        """(t, d) as (b, s, d), rows after the tokens at places of padding."""
        build, dims = self.builder, self.builder.facts.dims(packed)
        assert dims is not None
        inputs, hint = [packed, self._offset], "attnfuse/RestorePadding"
        return build.node(
            "RestorePadding", inputs, domain=CONTRIB, dims=[self.tokens.batch, self.tokens.length, dims[1]], hint=hint
        )

    def with_packing(self) -> UnpadFixed:
        """These rows with further inputs of PackedMultiHeadAttention; entries end where the rows do."""
        build, batch = self.builder, self.tokens.batch
        parts = [build.reshape(self._begins, [batch]), build.reshape(self._total, [1])]
        ends = build.node("Concat", parts, {"axis": 0})
        starts = build.elementwise("Min", [ends, self._number([self._room])])
        self.packing = Packing(self._offset, starts)
        return self

    def pad(self, packed: ir.Value, like: ir.Value, marks: Marks) -> ir.Value:
        """A packed value as `like` is laid out, rows of padding 0, or all NaN; see `PadUnpad.pad`."""
        dtype = self.builder.facts.dtype(like)
        if dtype is None or not dtype.is_floating_point():
            raise Refused("not-carried", "the restored rows cannot show that there were more tokens than rows")
        return super().pad(packed, like, marks)

    def _restored(self, packed: ir.Value) -> ir.Value:
        build, dtype = self.builder, self.builder.facts.dtype(packed)
        rows = self._put_back(packed)
        filling = build.elementwise("Where", [self._fits, build.scalar(0.0, dtype), build.scalar(float("nan"), dtype)])
        return build.elementwise("Where", [self._known, rows, filling])

    def _running(self, value: ir.Value, axis: int) -> ir.Value:
        """The exclusive cumulative sum along an axis."""
        inputs = [value, self.builder.constant(np.asarray(axis))]
        return self.builder.node("CumSum", inputs, {"exclusive": 1})

    def _number(self, array: object) -> ir.Value:
        return self.builder.constant(np.asarray(array, np.int32))
