"""Building a kernel's forward and backward part beside an attention, and putting both in its place together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes
from onnx_attnfuse.attention.axes.rearrange import arrange, cost
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.predicates import Other
from onnx_attnfuse.attention.match import operands as sources
from onnx_attnfuse.attention.match.candidates import anchor_of
from onnx_attnfuse.attention.spec import Axes4, Source
from onnx_attnfuse.fusion.commit import inner_values
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import answer_needless, check_shapes
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.targets.bias import BiasEmitter
from onnx_attnfuse.targets.layout import cheapest
from onnx_attnfuse.training.fully_masked_rows import Levelled, Treatment, levelled, smallest_gain
from onnx_attnfuse.training.ortmodule.kernels import AtenKernel, BackwardCall, KernelGradients, KernelOperands, Layout
from onnx_attnfuse.training.ortmodule.row_corrections import (
    AddedMaskCorrection,
    AddedOrZeroedCorrection,
    ReplacedScoresCorrection,
    RowCorrection,
    ZeroedRowsCorrection,
)
from onnx_attnfuse.training.ortmodule.site import TrainingSite
from onnx_attnfuse.transforms.rewriting import Edit

_CORRECTIONS: Mapping[Treatment, type[AddedMaskCorrection | ReplacedScoresCorrection | ZeroedRowsCorrection]] = {
    "added": AddedMaskCorrection,
    "replaced": ReplacedScoresCorrection,
    "zeroed": ZeroedRowsCorrection,
    "added or zeroed": AddedOrZeroedCorrection,
}


@dataclasses.dataclass(frozen=True)
class Layouts4:
    """The axes of queries, keys, values, result and bias in a kernel's layout."""

    query: Axes
    key: Axes
    value: Axes
    output: Axes

    @classmethod
    def of(cls, axes: Axes4, layout: Layout) -> Layouts4:
        """The layouts of an attention's query, key, value and result for a kernel."""
        pairs = ((axes.i, axes.h), (axes.j, axes.h), (axes.j, axes.v), (axes.i, axes.v))
        return cls(*(_ordered((axes.b, axes.n, rows, channels), layout) for rows, channels in pairs))


def _ordered(axes: Axes, layout: Layout) -> Axes:
    batch, heads, rows, channels = axes
    return axes if layout == "bnsh" else (batch, rows, heads, channels)


@dataclasses.dataclass(frozen=True)
class Handed:
    """How the mask is passed."""

    causal: bool
    bias: bool
    rows: Treatment
    """The correction of rows without a key."""


def fuse(site: TrainingSite, kernel: AtenKernel, handed: Handed, builder: Builder, edit: Edit) -> None:
    """Replaces the forward and the backward part of a site by a kernel's.

    Raises:
        Refused: Something cannot be expressed; nothing has changed then.
    """
    inner = [*inner_values(site.spec), *site.backward.inner]
    check_shapes(inner, builder)
    pairs = _Building(site, kernel, handed, builder).build()
    finals = [(end.value, _brought(builder, new, end)) for end, new in pairs]
    for old, new in finals:
        edit.connect([(old, new)])
        sweep([old])
    for value in inner:
        answer_needless(value, builder)
    sweep(inner)


def _brought(builder: Builder, new: IndexedValue, end: IndexedValue) -> ir.Value:
    """A new value in the layout and type of the one that it replaces."""
    value = arrange(builder, new, end.axes)
    dtype = builder.facts.dtype(end.value)
    return value if dtype is None else builder.cast(value, dtype)


class _Building:
    """Builds the kernel calls of one site, forward and backward."""

    def __init__(self, site: TrainingSite, kernel: AtenKernel, handed: Handed, builder: Builder) -> None:
        self.site, self.kernel, self.handed, self.builder = site, kernel, handed, builder
        self.spec = site.spec
        assert site.spec.dtype is not None
        self.dtype = site.spec.dtype
        self.layouts = Layouts4.of(site.spec.axes, kernel.layout)

    def build(self) -> list[tuple[IndexedValue, IndexedValue]]:
        """The values to replace, as far down as only views follow, and the new ones."""
        spec, backward, builder = self.spec, self.site.backward, self.builder
        name = f"{spec.name}/attention"
        rows = self._rows()
        given = self._operands(rows)
        saved = self.kernel.forward(builder, given.operands, name)
        output = IndexedValue(given.correction.result(saved["output"]), self.layouts.output)
        pairs = [(_end(spec.output, output), output)]
        builder.at(_first_reader(backward.output, backward.results, anchor_of(spec)))
        taken = self._taken(sources.sources(backward.output, builder.facts, plain=True), self.layouts.output)
        gradient = given.correction.gradient(taken)
        call = BackwardCall(self.kernel, given.operands, saved, gradient, f"{name}/backward", bool(backward.biases))
        found = self.kernel.backward(builder, call)
        return [*pairs, *self._gradients(given.correction.gradients(found, call, given.query, keys=backward.key is not None))]

    def _rows(self) -> Levelled | IndexedValue | None:
        """The mask as a bias, if it is passed as one."""
        if not self.handed.bias:
            return None
        dtype = ir.DataType.FLOAT if _only_forbids(self.site.meaning) else self.dtype
        compact = BiasEmitter(self.builder, self.spec.axes, dtype).compact(self.spec.mask)
        present = compact.axes[3] or self.spec.axes.j
        if not compact.axes[3]:
            full = (*compact.axes[:3], present)
            compact = IndexedValue(arrange(self.builder, compact, full), full)
        if self.handed.rows == "none":
            return IndexedValue(self.builder.cast(compact.value, self.dtype), compact.axes)
        rows = levelled(self.builder, compact, self.handed.rows, smallest_gain(self.spec.mask))
        return dataclasses.replace(rows, bias=IndexedValue(self.builder.cast(rows.bias.value, self.dtype), rows.bias.axes))

    def _operands(self, rows: Levelled | IndexedValue | None) -> _Given:
        """Queries, keys, values and bias in the kernel's layout."""
        spec = self.spec
        targets = (self.layouts.query, self.layouts.key, self.layouts.value)
        query, key, value = (self._taken(item, target) for item, target in zip(spec.operands(), targets, strict=True))
        correction = RowCorrection()
        if isinstance(rows, Levelled):
            fully_masked, all_infinite = (self._as_rows(test) for test in (rows.fully_masked, rows.all_infinite))
            correction = _CORRECTIONS[self.handed.rows](
                self.builder, self.dtype, rows, fully_masked, all_infinite, 2 if self.kernel.layout == "bnsh" else 1
            )
        bias = rows.bias if isinstance(rows, Levelled) else rows
        dropout = 0.0 if self.site.dropout is None else self.site.dropout.ratio
        added = None if bias is None else bias.value
        return _Given(
            KernelOperands(correction.query(query), key, value, added, self.handed.causal, dropout, spec.scale), query, correction
        )

    def _as_rows(self, test: ir.Value) -> ir.Value:
        """A test of rows so that it broadcasts against the queries."""
        return test if self.kernel.layout == "bnsh" else self.builder.transpose(test, [0, 2, 1, 3])

    def _taken(self, operand: tuple[Source, ...], target: Axes) -> ir.Value:
        """An operand in the kernel's layout, from wherever above it that costs least."""
        facts = self.builder.facts
        usable = tuple(
            source
            for source in operand
            if source.factor == 1.0 and source.rotary is None and facts.dtype(source.indexed.value) == self.dtype
        )
        source = cheapest(usable, target) if usable else operand[0]
        return self.builder.cast(arrange(self.builder, source.indexed, target), self.dtype)

    def _gradients(self, found: KernelGradients) -> list[tuple[IndexedValue, IndexedValue]]:
        """The gradients to replace, and their replacements."""
        backward, facts, axes = self.site.backward, self.builder.facts, self.spec.axes
        new = (
            (backward.query, found.query, self.layouts.query),
            (backward.key, found.key, self.layouts.key),
            (backward.value, found.value, self.layouts.value),
        )
        pairs: list[tuple[IndexedValue, IndexedValue]] = []
        for old, value, layout in new:
            if old is not None:
                indexed = IndexedValue(value, layout)
                pairs.append((_end(sources.readings(old, facts), indexed), indexed))
        for bias in backward.biases:
            assert found.bias is not None
            value = found.bias
            if bias.factor != 1.0:
                value = self.builder.elementwise("Mul", [value, self.builder.scalar(bias.factor, self.dtype)], self.dtype)
            pairs.append((bias.indexed, IndexedValue(value, axes.scores)))
        return pairs


@dataclasses.dataclass(frozen=True)
class _Given:
    """The inputs of the forward kernel, and the correction for rows without a key."""

    operands: KernelOperands
    query: ir.Value
    """The queries without regard to rows without a key."""
    correction: RowCorrection


def _only_forbids(meaning: Meaning) -> bool:
    """Whether a mask certainly leaves a score as it is or forbids it: the fill is -inf in a narrower type."""
    return not meaning.biases and not any(isinstance(item, Other) for item in meaning.predicates)


def _end(readings: Sequence[IndexedValue], new: IndexedValue) -> IndexedValue:
    """The reading of a result that the new value is brought into at least cost; of equals the one furthest down."""
    return min(reversed(readings), key=lambda indexed: cost(new, indexed.axes))


def _first_reader(output: IndexedValue, results: Sequence[IndexedValue], otherwise: ir.Node) -> ir.Node:
    """A node of the backward part."""
    producers = [indexed.value.producer() for indexed in results]
    return next((node for node in producers if node is not None), next((node for node, _ in output.value.uses()), otherwise))
