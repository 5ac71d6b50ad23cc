"""How attention is computed in a region of packed tokens: by an operator for them, or by its own nodes over padded operands."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Factor
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.fusion.packing.region import Region, Site
from onnx_attnfuse.fusion.packing.tokens import PadUnpad, Rows, Tokens, UnpadFixed, UnpadRows, UnpadTokens, count_of, others
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes, subgraphs
from onnx_attnfuse.graph.ops import ASKS_SHAPE
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.mask_encoding import KeyPadding
from onnx_attnfuse.targets.packed import PackedResult, attend


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
