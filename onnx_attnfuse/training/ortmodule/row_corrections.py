"""Corrections around a kernel for fully masked rows, before and after it, forward and backward; `fully_masked_rows` says why.

There is always one at least: kernels are not made for empty batches.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.training.fully_masked_rows import Levelled
from onnx_attnfuse.training.ortmodule.kernels import BackwardCall, KernelGradients


class RowCorrection:
    """Corrections around an attention kernel, forward and backward: none, as there are no fully masked rows."""

    def query(self, query: ir.Value) -> ir.Value:
        """The queries for the kernel."""
        return query

    def result(self, output: ir.Value) -> ir.Value:
        """The result, from the kernel's."""
        return output

    def gradient(self, gradient: ir.Value) -> ir.Value:
        """The gradient of the result for the kernel."""
        return gradient

    def gradients(self, found: KernelGradients, call: BackwardCall, query: ir.Value, *, keys: bool) -> KernelGradients:
        """The gradients, from the kernel's.

        Args:
            found: The kernel's results.
            call: How it was called.
            query: The queries as they were before.
            keys: The gradient of the keys is wanted.
        """
        del call, query, keys
        return found


@dataclasses.dataclass(frozen=True)
class _Rows(RowCorrection):
    """Fully masked rows, in the kernel's layout."""

    builder: Builder
    dtype: ir.DataType
    rows: Levelled
    fully_masked: ir.Value
    all_infinite: ir.Value
    row_axis: int

    def where(self, test: ir.Value, number: float, value: ir.Value) -> ir.Value:
        """`value` with a number where a test holds."""
        return self.choose(test, self.builder.scalar(number, self.dtype), value)

    def choose(self, test: ir.Value, chosen: ir.Value, other: ir.Value) -> ir.Value:
        """`chosen` where a test holds, else `other`, in the shape of the one that has channels."""
        found = self.builder.node("Where", [test, chosen, other], dtype=self.dtype)
        ranks = self.builder.facts.rank(chosen), self.builder.facts.rank(other)
        self.builder.facts.copy(chosen if ranks[0] else other, found)
        return found


@dataclasses.dataclass(frozen=True)
class AddedMaskCorrection(_Rows):
    """Correction where a mask is added to the scores."""

    def query(self, query: ir.Value) -> ir.Value:
        """Queries of fully masked rows: zeros make all scores equal; NaN, where the mask is -inf, makes the row NaN."""
        return self.where(self.all_infinite, math.nan, self.where(self.fully_masked, 0.0, query))

    def gradients(self, found: KernelGradients, call: BackwardCall, query: ir.Value, *, keys: bool) -> KernelGradients:
        """Adds to the keys' gradient the part of fully masked rows, which queries of zeros did not."""
        if not keys:
            return found
        builder, own = self.builder, self.builder.facts.dtype(self.rows.bias.value)
        together = (
            bool(call.operands.dropout) or not self.rows.bias.axes[0]
        )  # what dropout keeps depends on the place in the batch
        entries = None if together else entries_with(builder, self.rows.fully_masked)
        tensors = {name: value for name, value in call.saved.items() if builder.facts.rank(value) != 0}
        saved = {**call.saved, **{name: taken(builder, value, entries) for name, value in tensors.items()}}
        fully_masked, gradient, query, key, value = (
            taken(builder, item, entries)
            for item in (self.fully_masked, call.gradient, query, call.operands.key, call.operands.value)
        )
        zero = builder.scalar(0.0, self.dtype)
        gradient, query = (self.choose(fully_masked, item, zero) for item in (gradient, query))
        masked = [self.rows.fully_masked, self.rows.bias.value, builder.scalar(-math.inf, own)]
        again = dataclasses.replace(
            call.operands,
            query=query,
            key=builder.elementwise("Mul", [key, zero], self.dtype),
            value=value,
            bias=taken(builder, builder.elementwise("Where", masked, own), entries),
        )
        hint = f"{call.hint}/rows_without_key"
        more = call.kernel.backward(builder, BackwardCall(call.kernel, again, saved, gradient, hint))
        return dataclasses.replace(found, key=added_to(builder, found.key, more.key, entries, self.dtype))


@dataclasses.dataclass(frozen=True)
class ZeroedRowsCorrection(_Rows):
    """Correction where rows of -inf are zeros, and no other row is fully masked."""

    def result(self, output: ir.Value) -> ir.Value:
        """The result, 0 in rows of -inf alone."""
        return self.where(self.all_infinite, 0.0, output)

    def gradient(self, gradient: ir.Value) -> ir.Value:
        """The gradient of the result, 0 in rows of -inf alone; so are all that follow from it."""
        return self.where(self.all_infinite, 0.0, gradient)


@dataclasses.dataclass(frozen=True)
class AddedOrZeroedCorrection(ZeroedRowsCorrection, AddedMaskCorrection):
    """Correction where a mask is added to the scores, and rows of -inf are zeros."""

    def query(self, query: ir.Value) -> ir.Value:
        """Queries of fully masked rows: zeros make all scores equal."""
        return self.where(self.fully_masked, 0.0, query)


@dataclasses.dataclass(frozen=True)
class ReplacedScoresCorrection(_Rows):
    """Correction where a mask replaces scores."""

    def query(self, query: ir.Value) -> ir.Value:
        """Queries of fully masked rows: zeros make all scores equal."""
        return self.where(self.all_infinite, 0.0, self.where(self.fully_masked, 0.0, query))

    def result(self, output: ir.Value) -> ir.Value:
        """The result, NaN in rows of -inf alone."""
        return self.where(self.all_infinite, math.nan, output)

    def gradient(self, gradient: ir.Value) -> ir.Value:
        """The gradient of the result, 0 in rows of -inf alone."""
        return self.where(self.all_infinite, 0.0, gradient)

    def gradients(self, found: KernelGradients, call: BackwardCall, query: ir.Value, *, keys: bool) -> KernelGradients:
        """The gradients: 0 for the queries of fully masked rows, NaN for values that a row of -inf looks at."""
        del call, query, keys
        build = self.builder
        dims = build.facts.dims(self.all_infinite)
        all_infinite = self.all_infinite
        if dims is not None and dims[self.row_axis] != 1:
            all_infinite = build.holds_along(all_infinite, [self.row_axis])
        value = self.where(all_infinite, math.nan, found.value)
        return dataclasses.replace(found, query=self.where(self.fully_masked, 0.0, found.query), value=value)


_INDEX = ir.DataType.INT64


def entries_with(builder: Builder, tests: ir.Value) -> ir.Value:
    """The entries for which a test holds anywhere, as indices; the first entry if there are none.

    Args:
        builder: The builder.
        tests: Truth values of shape (b, n, s, 1), n and s possibly 1.
    """
    holds = builder.holds_along(tests, [1, 2, 3], keep=False)
    places = builder.node("NonZero", [holds], dtype=_INDEX)
    builder.facts.record(places, [1, builder.facts.fresh(places, 1)], _INDEX)
    found = builder.node("Reshape", [places, builder.constant([-1])], dtype=_INDEX)
    builder.facts.record(found, [builder.facts.fresh(found, 0)], _INDEX)
    one = builder.constant([1])
    count = builder.node("Shape", [found], dims=[1], dtype=_INDEX)
    none = builder.node("Sub", [one, builder.node("Min", [count, one], dims=[1], dtype=_INDEX)], dims=[1], dtype=_INDEX)
    spare = builder.node("Slice", [builder.constant([0]), builder.constant([0]), none, builder.constant([0])], dtype=_INDEX)
    entries = builder.node("Concat", [found, spare], {"axis": 0}, dtype=_INDEX)
    builder.facts.record(entries, [builder.facts.fresh(entries, 0)], _INDEX)
    return entries


def taken(builder: Builder, value: ir.Value, entries: ir.Value | None) -> ir.Value:
    """Some entries of a value, or all of one that is the same for all."""
    dims, dtype = builder.facts.dims(value), builder.facts.dtype(value)
    if entries is None or (dims is not None and dims[0] == 1):
        return value
    picked = builder.node("Gather", [value, entries], {"axis": 0}, dtype=dtype)
    count = builder.facts.dims(entries)
    assert count is not None
    builder.facts.record(picked, None if dims is None else [*count, *dims[1:]], dtype)
    return picked


def added_to(builder: Builder, value: ir.Value, more: ir.Value, entries: ir.Value | None, dtype: ir.DataType) -> ir.Value:
    """`value` with `more` added to some of its entries, or all."""
    own = taken(builder, value, entries)
    total = builder.elementwise("Add", [own, more], dtype)
    if entries is None or own is value:
        return total
    indices = builder.node("Unsqueeze", [entries, builder.constant([1])], dtype=_INDEX)
    dims = builder.facts.dims(value)
    return builder.node("ScatterND", [value, indices, total], dims=dims, dtype=dtype)
