"""Building a region on packed tokens beside the graph, each item verified by itself before it is built.

An item that gives for tokens taken out of a batch what it gives for the batch, at these tokens, does so in any order of items. So
every operator is verified alone, between unpad and pad, with other numbers in place of its weights. Attention is computed by an
operator for packed tokens, or by its own nodes over padded operands.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Factor
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.packing.region import Item, Region, Site, anchor
from onnx_attnfuse.fusion.packing.tokens import (
    PadUnpad,
    Rows,
    Tokens,
    UnpadFixed,
    UnpadRows,
    UnpadTokens,
    count_of,
)
from onnx_attnfuse.fusion.plan import PlanContext, params_of
from onnx_attnfuse.fusion.report_site import kernel_of_forecast
from onnx_attnfuse.graph.along import Marks, others
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes, constant_tensor, subgraphs
from onnx_attnfuse.graph.ops import ASKS_SHAPE
from onnx_attnfuse.graph.sweep import take_back
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.forecast import forecast
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.targets import multi_head_attention, packed
from onnx_attnfuse.targets.base import BuildContext, MaskEncoding
from onnx_attnfuse.targets.mask_encoding import KeyPadding
from onnx_attnfuse.targets.packed import PackedResult, attend
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.verdict import Verified


class AttentionForm(abc.ABC):
    """Attention on packed tokens, with the way in and the way out."""

    def __init__(self, tokens: Tokens, keep: ir.Value, given: ir.Value | None = None) -> None:
        self.tokens, self.given = tokens, given
        """`given`: a truth value, where which holds the form is equal; None: always."""
        self.keep = keep
        """Truth values (b, s): the token is packed."""
        self.changes_padding = False
        """Whether outputs differ in rows of padding, under `padded-rows-unused`."""
        self.attended: dict[Site, PackedResult] = {}
        """The operators that attentions became, when they were last built."""

    @abc.abstractmethod
    def pad_unpad(self) -> PadUnpad:
        """A way in and out that nothing has gone through yet."""

    def trial(self) -> PadUnpad:
        """The way in and out for the judge, which gives any number of tokens."""
        return self.pad_unpad()

    @abc.abstractmethod
    def attend(self, site: Site, operands: Sequence[ir.Value], pad_unpad: PadUnpad) -> ir.Value:
        """The result of an attention on packed operands, packed."""


class OperatorForm(AttentionForm):
    """PackedMultiHeadAttention, by default between RemovePadding and RestorePadding, which want padding on the right."""

    def __init__(self, tokens: Tokens, context: BuildContext, padding: KeyPadding, room: int | None = None) -> None:
        """Sets it up; with `room` for a fixed number of rows, which take any padding."""
        super().__init__(tokens, padding.keep, padding.exact("right_padded") if room is None else None)
        self._fixed = None if room is None else UnpadFixed(context.builder, tokens, self.keep, room).with_packing()
        self._context, self._padding = context, padding

    def pad_unpad(self) -> PadUnpad:
        """By the operators for it, or by rows whose number is fixed."""
        return self._fixed or UnpadTokens(self._context.builder, self.tokens, self._padding.lengths())

    def trial(self) -> PadUnpad:
        """The way in and out for the judge, with rows for all."""
        whole = None if self._fixed is None else UnpadFixed(self._context.builder, self.tokens, self.keep, None).with_packing()
        return whole or self.pad_unpad()

    def attend(self, site: Site, operands: Sequence[ir.Value], pad_unpad: PadUnpad) -> ir.Value:
        """By PackedMultiHeadAttention."""
        packed_tokens = Factor(count_of(operands[0], self._context.builder.facts))
        indexed = [
            IndexedValue(operand, ((packed_tokens,), *others(marks, source.indexed.refined().axes)))
            for operand, marks, source in zip(operands, site.operands, site.chosen, strict=True)
        ]
        assert isinstance(pad_unpad, UnpadFixed | UnpadTokens)
        assert pad_unpad.packing is not None
        wanted: Axes = others(site.marks, site.result.axes)
        found = attend(self._context, site.spec, site.meaning, site.chosen, indexed, pad_unpad.packing, wanted)
        self.attended[site] = found
        return found.value


class RowsForm(AttentionForm):
    """The attention's own nodes over operands whose places of padding hold finite numbers.

    Keys at these places are masked as before, and rows at these places are dropped. The nodes are planned and fused afterwards
    like those of any attention.
    """

    def __init__(self, region: Region, builder: Builder, keep: ir.Value, room: int | None = None) -> None:
        """Sets it up; with `room` for a fixed number of rows."""
        tokens = region.tokens
        super().__init__(tokens, keep)
        self._builder, self._inner = builder, frozenset(region.inner)
        self._rows = UnpadRows(builder, tokens, keep) if room is None else UnpadFixed(builder, tokens, keep, room)
        self.copies: dict[ir.Node, ir.Node] = {}
        """For each node of an attention its copy, the last time that it was built."""

    def pad_unpad(self) -> PadUnpad:
        """By one index for the whole region."""
        return self._rows

    def trial(self) -> PadUnpad:
        """The way in and out for the judge, with rows for all."""
        is_fixed = isinstance(self._rows, UnpadFixed)
        return UnpadFixed(self._builder, self.tokens, self.keep, None) if is_fixed else self._rows

    def attend(self, site: Site, operands: Sequence[ir.Value], pad_unpad: PadUnpad) -> ir.Value:
        """By copies of its nodes."""
        assert isinstance(pad_unpad, Rows)
        moved: dict[ir.Value, ir.Value] = {}
        for operand, marks, source in zip(operands, site.operands, site.chosen, strict=True):
            value = source.indexed.value
            moved[value] = pad_unpad.filled(operand, value, marks)
        for node in own_nodes(site, self._inner):
            self._copy(node, moved)
        return pad_unpad.unpad(moved[site.result.value], site.marks)

    def _copy(self, node: ir.Node, moved: dict[ir.Value, ir.Value]) -> None:
        build = self._builder
        first = build.node(
            node.op_type,
            [value if value is None else moved.get(value, value) for value in node.inputs],
            attributes(node),
            domain=node.domain,
            hint=f"{node.name or node.op_type}/rows",
            outputs=len(node.outputs),
        )
        copy = producer_of(first)
        copy.metadata_props.update(node.metadata_props)
        copy.doc_string = node.doc_string
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            dtype = build.facts.dtype(old)
            build.facts.record(new, build.facts.dims(old), dtype)
            if dtype is not None:
                new.dtype = dtype
            moved[old] = new
        self.copies[node] = copy


def own_nodes(site: Site, inner: Collection[ir.Value] = ()) -> list[ir.Node]:
    """The nodes that compute an attention from its chosen operands, in order.

    Args:
        site: The attention.
        inner: Values that are computed on packed tokens only.

    Raises:
        Refused: Something that is no part of the attention computes with its operands too, or another input is packed.
    """
    given = {source.indexed.value for source in site.chosen}
    own: dict[ir.Value, ir.Node] = {}
    known = _known_nodes(site)
    for node in _above(producer_of(site.result.value), given):
        if node.op_type in ASKS_SHAPE:
            continue
        depends = any(value in given or value in own for value in node.inputs if value is not None)
        packed = not depends and not set(node.outputs).isdisjoint(inner)
        if packed or (depends and (node not in known or any(True for _ in subgraphs(node)))):
            message = f"{node.op_type} computes something besides the scores of an attention from packed tokens"
            raise Refused("operator-between", message, node.name)
        own.update(dict.fromkeys(node.outputs if depends else (), node))
    return list(dict.fromkeys(own.values()))


def _above(last: ir.Node, given: Collection[ir.Value]) -> Iterator[ir.Node]:
    """A node and all of its graph that it is computed by from given values, each after those that it reads.

    The time that this takes grows with these nodes alone, as a model has many attentions.
    """
    seen: set[ir.Node] = set()
    pending = [(last, False)]
    while pending:
        node, done = pending.pop()
        if done:
            yield node
        elif node not in seen and node.graph is last.graph:
            seen.add(node)
            read = () if node.op_type in ASKS_SHAPE else reversed(node.inputs)
            makers = [value.producer() for value in read if value is not None and value not in given]
            pending += [(node, True), *((maker, False) for maker in makers if maker is not None)]


def _known_nodes(site: Site) -> set[ir.Node]:
    """The nodes of an attention, and those of all views and rotations around it."""
    spec = site.spec
    sources = [source for operand in spec.operands() for source in operand]
    values = [source.indexed.value for source in sources] + [indexed.value for indexed in spec.output]
    rotary = [node for source in sources if source.rotary is not None for node in source.rotary.nodes]
    found = {node for value in values if (node := value.producer()) is not None}
    return {*found, *spec.nodes, *rotary}


_MAX_SCALAR_LIKE_ELEMENTS = 16
"""Constants of at most so many elements are numbers that matter; larger ones are weights."""


@dataclasses.dataclass(frozen=True)
class PackedRegion:
    """A region on packed tokens beside the graph, verified and not connected yet."""

    region: Region
    restored: dict[ir.Value, ir.Value]
    """The value, padding restored, that takes the place of each exit of the region."""
    form: AttentionForm
    verified: dict[Site, Verified | None]
    added: frozenset[ir.Node]
    """The nodes that were built."""


class RegionBuilder:
    """Builds a region, inside a rewrite."""

    def __init__(self, region: Region, form: AttentionForm, graph: GraphContext) -> None:
        self._region = region
        self._form = form
        self._graph = graph
        self._builder = graph.builder
        self._pad_unpad = form.pad_unpad()
        self._packed: dict[ir.Value, ir.Value] = {}
        self._verified: dict[Site, Verified | None] = {}

    def build(self) -> PackedRegion:
        """Builds all items of the region.

        Raises:
            Refused: An item is not equal on packed tokens.
        """
        builder = self._builder
        nodes, constants = len(builder.added), len(builder.constants)
        verdicts = [self._judged(item) for item in self._region.items]
        self._forget_trials(nodes, constants)
        for item, verdict in zip(self._region.items, verdicts, strict=True):
            self._builder.at(anchor(item))
            for value, marks in item.inputs():
                if value not in self._packed:
                    self._packed[value] = self._pad_unpad.unpad(value, marks)
            operands = [self._packed[value] for value, _ in item.inputs()]
            if isinstance(item, Site):
                self._verified[item] = verdict
                self._packed[item.result.value] = self._form.attend(item, operands, self._pad_unpad)
            else:
                self._packed.update(zip(item.node.outputs, item.on_packed(self._builder, operands), strict=False))
        restored = {value: self._restored(value, marks) for value, marks in self._region.exits.items()}
        added = frozenset(self._builder.added)
        return PackedRegion(self._region, restored, self._form, self._verified, added)

    def _restored(self, value: ir.Value, marks: Marks) -> ir.Value:
        node = producer_of(value)
        self._builder.at(node)
        return self._pad_unpad.pad(self._packed[value], value, marks)

    def _forget_trials(self, nodes: int, constants: int) -> None:
        """Removes the nodes built for verification, that is all but so many nodes and constants; their names are free again."""
        builder = self._builder
        trials = builder.added[nodes:]
        take_back(trials, builder.constants[constants:])
        builder.names.difference_update(item.name for node in trials for item in (node, *node.outputs) if item.name is not None)
        del builder.added[nodes:], builder.constants[constants:]

    def _judged(self, item: Item) -> Verified | None:
        """Has an item judged by itself.

        Raises:
            Refused: It differs, or could not be shown equal.
        """
        if self._graph.verifier.level == "none":
            return None
        self._builder.at(anchor(item))
        keep, given = self._form.keep, None
        pad_unpad: PadUnpad
        compute: Callable[[Sequence[ir.Value]], Sequence[ir.Value]]
        if isinstance(item, Site):
            site, inside = item, self._form.trial()
            pad_unpad, given = inside, self._form.given
            compute = lambda operands: [self._form.attend(site, operands, inside)]  # noqa: E731 - one of two
            outputs = [(item.result.value, item.marks)]
        else:
            step, pad_unpad = item, UnpadRows(self._builder, self._region.tokens, keep)
            compute = lambda operands: step.on_packed(self._builder, operands)  # noqa: E731 - the other
            outputs = list(zip(item.node.outputs, item.outputs, strict=False))
        news = compute([pad_unpad.unpad(value, marks) for value, marks in item.inputs()])
        pairs = [
            (pad_unpad.masked(old, marks, keep), pad_unpad.pad(new, old, marks))
            for (old, marks), new in zip(outputs, news, strict=False)
        ]
        frontier = [value for value, _ in item.inputs()] + _weights(item)
        try:
            name = anchor(item).name or ""
            return self._graph.verify(pairs, frontier, name, given)
        except Refused as refused:
            reason = refused.reason
            raise Refused(reason.code, f"on packed tokens: {reason.message}", anchor(item).name) from refused


def _weights(item: Item) -> list[ir.Value]:
    """Large constants, in place of which the judge may take any numbers."""
    if isinstance(item, Site):
        return []
    found: list[ir.Value] = []
    for value in item.free():
        tensor = constant_tensor(value)
        if tensor is not None and tensor.size > _MAX_SCALAR_LIKE_ELEMENTS and tensor.dtype.is_floating_point():
            found.append(value)
    return found


_WHEN = "padding is on the right"
_MAX_LISTED_NAMES = 3
_SHAPE_ONLY = Reason("shape-used", "only the shape of its result is used, which packing does not need")


def packed_params(spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext) -> AttentionParams:
    """Parameters of an attention on packed tokens, for the forecast of its kernel."""
    params = params_of(spec, MaskEncoding("bias" if meaning.biases else "none", when="right_padded"), multi_head_attention)
    return dataclasses.replace(params, op=packed.INFO.key).with_lengths(plan_context.lengths)


def packed_report(
    found: SiteReport, packed_region: PackedRegion, site: Site, plan_context: PlanContext, usual: SiteReport | None
) -> SiteReport:
    """The report on one attention.

    Args:
        found: The report before.
        packed_region: The packed region.
        site: The attention.
        plan_context: The context of its plan.
        usual: The report on its form where padding is not on the right; None if it is taken to be.
    """
    attended = packed_region.form.attended.get(site)
    if attended is None:
        return usual or dataclasses.replace(found, reasons=(_SHAPE_ONLY,))
    form = "packed + attention_bias" if site.meaning.biases else "packed"
    forecast_packed = forecast(packed_params(site.spec, site.meaning, plan_context), plan_context.device)
    form = form if usual is None else f"{form}, else {usual.mask_form or 'decomposed'}"
    return dataclasses.replace(
        found,
        status="fused",
        op=packed.INFO.name,
        domain=packed.INFO.domain,
        scale=attended.scale,
        mask_form=form,
        kernel=kernel_of_forecast(forecast_packed, plan_context.device, _WHEN, None if usual is None else usual.kernel),
        layout=attended.layouts,
        verified=packed_region.verified[site],
        reasons=() if usual is None else usual.reasons,
    )


def note(packed_region: PackedRegion, where: str) -> str:
    """A line on the packed nodes, its values still called as they are in the source."""
    region = packed_region.region
    removed = _listed(sorted(value.name or "" for value in region.entries))
    restored = _listed(sorted(value.name or "" for value in region.exits))
    assumed = " (assumes padded-rows-unused)" if packed_region.form.changes_padding else ""
    line = f"padding{where} is removed from {removed} and restored as 0 in {restored}{assumed}"
    readers = sorted({node.op_type for found in region.readers.values() for node in found})
    return f"{line}, which {_listed(readers)} reads" if readers else line


def _listed(names: list[str]) -> str:
    shown = names[:_MAX_LISTED_NAMES] + (["…"] if len(names) > _MAX_LISTED_NAMES else [])
    return ", ".join(f"'{name}'" if name != "…" else name for name in shown)
