"""Building a kernel's forward and backward part beside an attention, and putting both in its place together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.axes.arrange import arrange, cost
from onnx_attnfuse.axes.factors import Axes
from onnx_attnfuse.axes.views import Laid
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.masks.meaning import Meaning, Other
from onnx_attnfuse.match import operands as sources
from onnx_attnfuse.match.finder import anchor_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewrite import answer_shapes, check_shapes, connect, inner_values
from onnx_attnfuse.spec import Axes4, Source
from onnx_attnfuse.targets.bias import BiasEmitter
from onnx_attnfuse.targets.layout import cheapest
from onnx_attnfuse.training.care import AddedCare, Call, Care, NoCare, ReplacedCare
from onnx_attnfuse.training.kernels.kernel import Gradients, Kernel, Layout, Operands
from onnx_attnfuse.training.rows import Levelled, Treatment, levelled
from onnx_attnfuse.training.site import TrainingSite


@dataclasses.dataclass(frozen=True)
class Layouts4:
    """The axes of queries, keys, values, result and bias in a kernel's layout."""

    query: Axes
    key: Axes
    value: Axes
    output: Axes

    @classmethod
    def of(cls, axes: Axes4, layout: Layout) -> Layouts4:
        """Those of an attention."""
        pairs = ((axes.i, axes.h), (axes.j, axes.h), (axes.j, axes.v), (axes.i, axes.v))
        return cls(*(_ordered((axes.b, axes.n, rows, channels), layout) for rows, channels in pairs))


def _ordered(axes: Axes, layout: Layout) -> Axes:
    batch, heads, rows, channels = axes
    return axes if layout == "bnsh" else (batch, rows, heads, channels)


@dataclasses.dataclass(frozen=True)
class Handed:
    """How the mask is handed over."""

    causal: bool
    bias: bool
    rows: Treatment
    """What rows without a key need."""


def fuse(site: TrainingSite, kernel: Kernel, handed: Handed, builder: Builder) -> None:
    """Replaces the forward and the backward part of a site by a kernel's, or neither.

    Raises:
        Refused: Something cannot be expressed; nothing has changed then.
    """
    added: list[ir.Node] = []
    inner = [*inner_values(site.spec), *site.backward.inner]
    check_shapes(inner, builder)
    try:
        pairs = _Building(site, kernel, handed, builder, added).build()
        finals = [(end, _brought(builder, new, end)) for end, new in pairs]
    except Refused:
        added += builder.added
        sweep(output for node in reversed(added) for output in node.outputs)
        raise
    for end, value in finals:
        old = end.value
        connect(old, value, builder, [node for node, _ in old.uses()])
        sweep([old])
    for value in inner:
        if value.graph is not None and not value.is_graph_output() and not viewers(value):
            answer_shapes(value, builder)
    sweep(inner)


def _brought(builder: Builder, new: Laid, end: Laid) -> ir.Value:
    """A new value in the layout and type of the one that it replaces."""
    value = arrange(builder, new, end.axes)
    dtype = builder.facts.dtype(end.value)
    return value if dtype is None else builder.cast(value, dtype)


class _Building:
    """What is built for one site."""

    def __init__(self, site: TrainingSite, kernel: Kernel, handed: Handed, builder: Builder, added: list[ir.Node]) -> None:
        self.site, self.kernel, self.handed, self.builder, self.added = site, kernel, handed, builder, added
        self.spec = site.spec
        assert site.spec.dtype is not None
        self.dtype = site.spec.dtype
        self.layouts = Layouts4.of(site.spec.axes, kernel.LAYOUT)

    def build(self) -> list[tuple[Laid, Laid]]:
        """The values to replace, as far down as only views follow, and the new ones."""
        spec, backward, builder = self.spec, self.site.backward, self.builder
        name = f"{spec.name}/attention"
        builder.at(anchor_of(spec))
        rows = self._rows()
        given = self._operands(rows)
        saved = self.kernel.forward(builder, given.operands, name)
        output = Laid(given.care.result(saved["output"]), self.layouts.output)
        pairs = [(_end(spec.output, output), output)]
        self.added += builder.added
        builder.at(_first_reader(backward.output, backward.results, anchor_of(spec)))
        taken = self._taken(sources.sources(backward.output, builder.facts, plain=True), self.layouts.output)
        call = Call(self.kernel, given.operands, saved, given.care.gradient(taken), f"{name}/backward")
        found = self.kernel.backward(builder, call.operands, saved, call.gradient, call.hint, bias_gradient=bool(backward.biases))
        return [*pairs, *self._gradients(given.care.gradients(found, call, given.query, keys=backward.key is not None))]

    def _rows(self) -> Levelled | Laid | None:
        """The mask as a bias, if it is handed over as one."""
        if not self.handed.bias:
            return None
        dtype = ir.DataType.FLOAT if _only_forbids(self.site.meaning) else self.dtype
        compact = BiasEmitter(self.builder, self.spec.axes, dtype).compact(self.spec.mask)
        present = compact.axes[3] or self.spec.axes.j
        if not compact.axes[3]:
            full = (*compact.axes[:3], present)
            compact = Laid(arrange(self.builder, compact, full), full)
        if self.handed.rows == "none":
            return Laid(self.builder.cast(compact.value, self.dtype), compact.axes)
        rows = levelled(self.builder, compact, self.handed.rows)
        return dataclasses.replace(rows, bias=Laid(self.builder.cast(rows.bias.value, self.dtype), rows.bias.axes))

    def _operands(self, rows: Levelled | Laid | None) -> _Given:
        """Queries, keys, values and bias in the kernel's layout."""
        spec = self.spec
        targets = (self.layouts.query, self.layouts.key, self.layouts.value)
        query, key, value = (self._taken(item, target) for item, target in zip(spec.operands(), targets, strict=True))
        care = NoCare()
        if isinstance(rows, Levelled):
            dead, lost = (self._as_rows(test) for test in (rows.dead, rows.lost))
            kind = AddedCare if self.handed.rows == "added" else ReplacedCare
            care = kind(self.builder, self.dtype, rows, dead, lost, 2 if self.kernel.LAYOUT == "bnsh" else 1)
        bias = rows.bias if isinstance(rows, Levelled) else rows
        dropout = 0.0 if self.site.dropout is None else self.site.dropout.ratio
        added = None if bias is None else bias.value
        return _Given(Operands(care.query(query), key, value, added, self.handed.causal, dropout, spec.scale), query, care)

    def _as_rows(self, test: ir.Value) -> ir.Value:
        """A test of rows so that it broadcasts against the queries."""
        return test if self.kernel.LAYOUT == "bnsh" else self.builder.transpose(test, [0, 2, 1, 3])

    def _taken(self, operand: tuple[Source, ...], target: Axes) -> ir.Value:
        """An operand in the kernel's layout, from wherever above it that costs least."""
        facts = self.builder.facts
        usable = tuple(
            source
            for source in operand
            if source.factor == 1.0 and source.rotary is None and facts.dtype(source.laid.value) == self.dtype
        )
        source = cheapest(usable, target) if usable else operand[0]
        return self.builder.cast(arrange(self.builder, source.laid, target), self.dtype)

    def _gradients(self, found: Gradients) -> list[tuple[Laid, Laid]]:
        """The gradients to replace, and what by."""
        backward, facts, axes = self.site.backward, self.builder.facts, self.spec.axes
        new = (
            (backward.query, found.query, self.layouts.query),
            (backward.key, found.key, self.layouts.key),
            (backward.value, found.value, self.layouts.value),
        )
        pairs: list[tuple[Laid, Laid]] = []
        for old, value, layout in new:
            if old is not None:
                laid = Laid(value, layout)
                pairs.append((_end(sources.readings(old, facts), laid), laid))
        for bias in backward.biases:
            assert found.bias is not None
            value = found.bias
            if bias.factor != 1.0:
                value = self.builder.elementwise("Mul", [value, self.builder.scalar(bias.factor, self.dtype)], self.dtype)
            pairs.append((bias.laid, Laid(value, axes.scores)))
        return pairs


@dataclasses.dataclass(frozen=True)
class _Given:
    """What the forward kernel is given."""

    operands: Operands
    query: ir.Value
    """The queries without regard to rows without a key."""
    care: Care


def _only_forbids(meaning: Meaning) -> bool:
    """Whether a mask certainly leaves a score as it is or forbids it: the fill is -inf in a narrower type."""
    return not meaning.biases and not any(isinstance(item, Other) for item in meaning.predicates)


def _end(readings: Sequence[Laid], new: Laid) -> Laid:
    """The reading of a result that the new value is brought into at least cost; of equals the one furthest down."""
    return min(reversed(readings), key=lambda laid: cost(new, laid.axes))


def _first_reader(output: Laid, results: Sequence[Laid], otherwise: ir.Node) -> ir.Node:
    """A node of the backward part."""
    producers = [laid.value.producer() for laid in results]
    return next((node for node in producers if node is not None), next((node for node, _ in output.value.uses()), otherwise))
