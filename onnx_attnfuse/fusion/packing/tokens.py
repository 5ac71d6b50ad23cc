"""Tokens of a batch: which axes of a value they run over, into packed form, and back.

Marks say it for each axis: `b`, `s`, both joined (`bs`, `sb`), or nothing for channels. In packed form the marked axes become one
that runs over the tokens that are no padding, in front of the others. The way in and out is by ONNX Runtime's operators, or, for
the verifier, by those of the standard, which do the same. RemovePadding wants padding on the right, and only a GPU runs it.
Plain operators take any padding and any runtime has them; tokenwise operators are always verified with those.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, upward
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.along import Marks, others
from onnx_attnfuse.graph.build import Builder, dims_of, dtype_of
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.packed import Packing


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The sizes of the batch that is packed."""

    facts: Facts
    batch: Dim
    length: Dim

    def size(self, mark: str) -> Dim:
        """The length of a marked axis."""
        return sizes.product({"b": self.batch, "s": self.length}[letter] for letter in mark)

    def is_full(self, value: ir.Value, marks: Marks) -> bool:
        """Whether a value has every token, rather than one for all entries or positions."""
        dims = self.facts.dims(value)
        return (
            dims is not None
            and len(dims) == len(marks)
            and all(not m or d == self.size(m) for m, d in zip(marks, dims, strict=True))
        )

    def fits(self, value: ir.Value, marks: Marks) -> bool:
        """Whether a value broadcasts to every token."""
        dims = self.facts.dims(value)
        if dims is None or len(dims) > len(marks):
            return False
        return all(
            not mark or dim in {1, self.size(mark)} for mark, dim in zip(marks[len(marks) - len(dims) :], dims, strict=True)
        )


def count_of(packed: ir.Value, facts: Facts) -> Dim:
    """How many tokens a packed value has."""
    dims = facts.dims(packed)
    assert dims
    return dims[0]


def read_marks(axes: Axes, batch: Axis, rows: Axis) -> Marks | None:
    """The marks of a layout; None if its tokens share an axis with something else, or it has not all of them."""
    known = {"b": leaves(batch), "s": leaves(rows), "bs": leaves((*batch, *rows)), "sb": leaves((*rows, *batch))}
    marked = set(known["bs"])
    found: list[str] = []
    for axis in refined(axes):
        mark = "" if marked.isdisjoint(axis) else next((name for name, parts in known.items() if axis == parts), None)
        if mark is None:
            return None
        found.append(mark)
    return tuple(found) if sorted("".join(found)) == ["b", "s"] else None


def as_axes(marks: Marks, dims: Dims, tokens: Tokens) -> tuple[Axes, Factor, Factor]:
    """A layout with these marks, and its factors for batch entries and positions."""
    letters = {"b": Factor(tokens.batch), "s": Factor(tokens.length)}
    axes: list[Axis] = []
    for mark, dim in zip(marks, dims, strict=True):
        axes.append(tuple(letters[letter] for letter in mark) if mark else () if dim == 1 else (Factor(dim),))
    return tuple(axes), letters["b"], letters["s"]


def spread(builder: Builder, value: ir.Value, marks: Marks, tokens: Tokens) -> ir.Value:
    """A value for every entry and position, where it is the same for some."""
    if tokens.is_full(value, marks):
        return value
    dims = builder.facts.dims(value)
    if dims is None:
        raise Refused("two-layouts", f"'{value.name}' is of unknown shape where tokens are rearranged")
    dims = (*[1] * (len(marks) - len(dims)), *dims)
    wanted = [tokens.size(mark) if mark else dim for mark, dim in zip(marks, dims, strict=True)]
    return builder.expand(builder.reshape(value, dims), wanted)


def through(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Marks | None:
    """The marks at the other side of a view, whose output or first input `value` is."""
    dims = tokens.facts.dims(value)
    if dims is None or len(dims) != len(marks):
        return None
    axes, batch, rows = as_axes(marks, dims, tokens)
    found = upward(IndexedValue(value, axes), tokens.facts) if value in node.outputs else downward(node, axes, tokens.facts)
    return None if found is None else read_marks(found.axes, (batch,), (rows,))


_TRUTH, _INDEX, _SMALL = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32


class PadUnpad(abc.ABC):
    """The way in and the way out."""

    def __init__(self, builder: Builder, tokens: Tokens) -> None:
        self.builder = builder
        self.tokens = tokens

    def unpad(self, value: ir.Value, marks: Marks) -> ir.Value:
        """A value in packed form."""
        build, dtype = self.builder, self.builder.facts.dtype(value)
        whole = build.cast(value, ir.DataType.FLOAT) if dtype == _TRUTH else value
        whole = spread(build, whole, marks, self.tokens)
        dims = dims_of(build, whole)
        axes, batch, rows = as_axes(marks, dims, self.tokens)
        channels = others(marks, axes)
        flat = arrange(build, IndexedValue(whole, axes), ((batch,), (rows,), tuple(leaf for axis in channels for leaf in axis)))
        removed = self._removed(flat)
        count = count_of(removed, build.facts)
        packed = build.reshape(removed, (count, *others(marks, dims)))
        return packed if dtype is None else build.cast(packed, dtype)

    def pad(self, packed: ir.Value, like: ir.Value, marks: Marks) -> ir.Value:
        """A packed value as `like` is laid out, rows of padding 0."""
        build, dtype, dims = self.builder, self.builder.facts.dtype(like), dims_of(self.builder, like)
        axes, batch, rows = as_axes(marks, dims, self.tokens)
        channels = tuple(leaf for axis in others(marks, axes) for leaf in axis)
        count = count_of(packed, build.facts)
        number = build.cast(packed, ir.DataType.FLOAT) if dtype == _TRUTH else packed
        flat = build.reshape(number, (count, sizes.product(others(marks, dims))))
        whole: Axes = ((batch,), (rows,), channels)
        restored = arrange(build, IndexedValue(self._restored(flat), whole), axes)
        return restored if dtype is None else build.cast(restored, dtype)

    def masked(self, value: ir.Value, marks: Marks, keep: ir.Value) -> ir.Value:
        """A value with 0 in the rows of padding, `keep` being (b, s)."""
        build, dims, dtype = self.builder, dims_of(self.builder, value), dtype_of(self.builder, value)
        axes, batch, rows = as_axes(marks, dims, self.tokens)
        marked: Axes = tuple(axis if mark else () for axis, mark in zip(axes, marks, strict=True))
        seen = arrange(build, IndexedValue(keep, ((batch,), (rows,))), marked)
        if dtype == _TRUTH:
            return build.elementwise("And", [value, seen])
        zero = build.constant(np.zeros((), dtype.numpy()), "attnfuse/zero")
        return build.elementwise("Where", [seen, value, zero])

    def _put_back(self, packed: ir.Value, offset: ir.Value) -> ir.Value:
        """(t, d) as (b, s, d) by RestorePadding, rows after the tokens at places of padding."""
        shape = [self.tokens.batch, self.tokens.length, dims_of(self.builder, packed)[1]]
        hint = "attnfuse/RestorePadding"
        return self.builder.node("RestorePadding", [packed, offset], domain=CONTRIB, dims=shape, hint=hint)

    @abc.abstractmethod
    def _removed(self, value: ir.Value) -> ir.Value:
        """(b, s, d) as (t, d)."""

    @abc.abstractmethod
    def _restored(self, packed: ir.Value) -> ir.Value:
        """(t, d) as (b, s, d)."""


class UnpadTokens(PadUnpad):
    """By RemovePadding and RestorePadding."""

    def __init__(self, builder: Builder, tokens: Tokens, lengths: ir.Value) -> None:
        super().__init__(builder, tokens)
        self._lengths = lengths
        self.packing: Packing | None = None
        """The result of the first way in; nothing can leave before something has entered."""

    def _removed(self, value: ir.Value) -> ir.Value:
        build = self.builder
        dims, dtype = dims_of(build, value), build.facts.dtype(value)
        hint = "attnfuse/RemovePadding"
        removed = build.node("RemovePadding", [value, self._lengths], domain=CONTRIB, hint=hint, outputs=4)
        node = producer_of(removed)
        for item in node.outputs[1:]:
            item.dtype = ir.DataType.INT32
        known = None if self.packing is None else build.facts.dims(self.packing.offset)
        build.facts.record(node.outputs[1], known or (self.tokens.batch, self.tokens.length), ir.DataType.INT32)
        build.facts.record(node.outputs[2], [self.tokens.batch + 1], ir.DataType.INT32)
        build.facts.record(removed, [build.facts.fresh(removed, 0), dims[2]], dtype)
        if self.packing is None:
            self.packing = Packing(node.outputs[1], node.outputs[2])
        return removed

    def _restored(self, packed: ir.Value) -> ir.Value:
        assert self.packing is not None
        return self._put_back(packed, self.packing.offset)


class Rows(PadUnpad):
    """By taking rows out and putting them back; any padding will do."""

    index: ir.Value
    """(t): the place of each row among those of all entries."""

    @abc.abstractmethod
    def filled(self, packed: ir.Value, like: ir.Value, marks: Marks) -> ir.Value:
        """A packed value as `like` is laid out, with finite numbers at the places of padding."""

    def _removed(self, value: ir.Value) -> ir.Value:
        build, dims = self.builder, dims_of(self.builder, value)
        rows = build.reshape(value, [self.tokens.batch * self.tokens.length, dims[2]])
        return build.node("Gather", [rows, self.index], {"axis": 0})


class UnpadRows(Rows):
    """By as many rows as are kept, with operators of the standard."""

    def __init__(self, builder: Builder, tokens: Tokens, keep: ir.Value) -> None:
        super().__init__(builder, tokens)
        whole = builder.reshape(keep, [tokens.batch * tokens.length])
        found = builder.node("NonZero", [whole])
        builder.facts.record(found, [1, builder.facts.fresh(found, 1)], _INDEX)
        self._rows = builder.transpose(found, [1, 0])
        self.index = builder.reshape(self._rows, [count_of(self._rows, builder.facts)])
        counted = [builder.cast(whole, _INDEX), builder.constant(np.asarray(0))]
        running = builder.node("CumSum", counted)
        before = builder.elementwise("Sub", [running, builder.constant([1])])
        first = builder.elementwise("Max", [before, builder.constant([0])])
        self._nearest = builder.reshape(first, [tokens.batch, tokens.length])

    def filled(self, packed: ir.Value, like: ir.Value, marks: Marks) -> ir.Value:
        """A packed value as `like` is laid out, with copies of tokens at the places of padding."""
        build, dims = self.builder, dims_of(self.builder, like)
        axes, batch, rows = as_axes(marks, dims, self.tokens)
        gathered = build.node("Gather", [packed, self._nearest], {"axis": 0})
        return arrange(build, IndexedValue(gathered, ((batch,), (rows,), *others(marks, axes))), axes)

    def _restored(self, packed: ir.Value) -> ir.Value:
        build, dims, dtype = self.builder, dims_of(self.builder, packed), dtype_of(self.builder, packed)
        shape = [self.tokens.batch * self.tokens.length, dims[1]]
        zeros = build.expand(build.constant(np.zeros((1, 1), dtype.numpy()), "attnfuse/zero"), shape)
        rows = build.node("ScatterND", [zeros, self._rows, packed])
        return build.reshape(rows, [self.tokens.batch, self.tokens.length, dims[1]])


class UnpadFixed(Rows):
    """By rows whose number is fixed, as a captured graph needs: tokens first, after them places of padding.

    Nothing waits for a GPU. Where a batch has more tokens than rows, all that is restored is NaN: nothing is lost without a sign.
    """

    packing: Packing | None
    """Further inputs of PackedMultiHeadAttention, where it was asked for."""

    def __init__(self, builder: Builder, tokens: Tokens, keep: ir.Value, room: int | None) -> None:
        """Builds the index of so many rows, or of all.

        Raises:
            Refused: The sizes of the batch are no numbers.
        """
        super().__init__(builder, tokens)
        if not isinstance(tokens.batch, int) or not isinstance(tokens.length, int):
            raise Refused("open-size", "a fixed number of rows needs a batch of fixed sizes")
        shape, line = (tokens.batch, tokens.length), np.arange(tokens.batch * tokens.length)
        self._room, self.packing = min(room or line.size, line.size), None
        kept = builder.cast(keep, _SMALL)
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
        build, dims = self.builder, dims_of(self.builder, like)
        axes, batch, rows = as_axes(marks, dims, self.tokens)
        channels = others(marks, dims)
        flat = build.reshape(packed, [self._room, sizes.product(channels)])
        whole: Axes = ((batch,), (rows,), tuple(leaf for axis in others(marks, axes) for leaf in axis))
        return arrange(build, IndexedValue(self._put_back(flat, self._offset), whole), axes)

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
        rows = self._put_back(packed, self._offset)
        filling = build.elementwise("Where", [self._fits, build.scalar(0.0, dtype), build.scalar(float("nan"), dtype)])
        return build.elementwise("Where", [self._known, rows, filling])

    def _running(self, value: ir.Value, axis: int) -> ir.Value:
        """The exclusive cumulative sum along an axis."""
        inputs = [value, self.builder.constant(np.asarray(axis))]
        return self.builder.node("CumSum", inputs, {"exclusive": 1})

    def _number(self, array: object) -> ir.Value:
        return self.builder.constant(np.asarray(array, np.int32))
