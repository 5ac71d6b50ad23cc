"""Packing by operators of the standard: only rows that are kept go through products, norms and MLPs.

Kept are tokens, all of an entry that has none, and the first position where it is read. If a mask forbids more than padding, a
first position that is padding may see no key, and its result is of all rows, so its whole entry is kept. Attentions get rows by a
Gather and stay as they are, so any mask, bias and window is possible. An output that depends on no row of padding is equal for
every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import factors_of
from onnx_attnfuse.attention.masks.predicates import Padding
from onnx_attnfuse.attention.masks.seen_keys import rows_see_themselves
from onnx_attnfuse.attention.match.candidates import Candidate, anchor_of
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import conjoin
from onnx_attnfuse.fusion.packing.build_region import AttentionForm, PackedRegion, RowsForm, note, own_nodes
from onnx_attnfuse.fusion.packing.packer import Packer
from onnx_attnfuse.fusion.packing.padding_rows import Around, MaskedRows, read_padding_rows
from onnx_attnfuse.fusion.packing.region import Region
from onnx_attnfuse.fusion.plan import PlanContext
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.edit import answer_needless, check_shapes
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import dependents
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.mask_encoding import KeyPadding
from onnx_attnfuse.transforms.rewriting import GraphContext

_TRUTH = ir.DataType.BOOL


def pack_rows(
    fuser: SiteFuser, candidates: Sequence[Candidate], plan_context: PlanContext, *, asked: bool, room: int | None = None
) -> tuple[int, list[str]]:
    """Packs the nodes around the attentions of one graph; returns the number of attentions, and lines for the report.

    Args:
        fuser: The fuser that runs afterwards.
        candidates: The attentions.
        plan_context: The context of their plans.
        asked: Rows of padding may come out as 0, and refusals are reported.
        room: How many rows there are, where that is fixed.
    """
    if not asked and room is None and _gives_padding([item.spec for item in candidates if item.spec is not None], fuser.graph):
        return 0, []
    packer = RowsPacker(fuser.graph, fuser.context, plan_context, asked=asked, room=room)
    wanted: list[tuple[AttentionSpec, Meaning]] = []
    for candidate in candidates:
        if candidate.spec is not None:
            fuser.context.builder.at(anchor_of(candidate.spec))
            meaning = understand(candidate.spec, fuser.context.reader)
            if packer.refuse(candidate.spec, meaning) is None:
                meaning = fuser.graph.check_mask(candidate.spec, meaning)
            wanted.append((candidate.spec, meaning))
    count, notes = 0, list[str]()
    for packed_region in packer.build_region(wanted, [item.node for item in candidates]):
        notes.append(note(packed_region, ""))
        packer.connect(packed_region)
        _finish(packed_region, fuser.context.builder)
        count += len(packed_region.region.sites)
    if asked:
        notes += [f"padding stays: {reason}" for reason in dict.fromkeys(packer.reasons.values())]
    return count, notes


def _gives_padding(specs: Sequence[AttentionSpec], graph: GraphContext) -> bool:
    """Whether an output has a row for each token, those of padding too, which can be seen after the last attention already.

    Rows that something else multiplies or chooses may be masked; a sum with something else masks none.
    """
    if not specs or isinstance(rows := length(specs[-1].axes.i), int):
        return False
    facts = graph.scope.facts
    result, *rest = dependents([specs[-1].output[0].value])
    after = {result, *rest}
    others = (
        value
        for node in dict.fromkeys(value.producer() for value in rest)
        if node is not None and node.op_type != "Add"
        for value in node.inputs
        if value is not None and value not in after and not is_constant(value)
    )
    numbers = {*FLOATS, ir.DataType.BOOL}
    given = any(value in after and rows in (facts.dims(value) or ()) for value in graph.scope.graph.outputs)
    return given and not any(facts.dtype(value) in numbers for value in others)


def _finish(packed_region: PackedRegion, builder: Builder) -> None:
    """Removes the old nodes of attentions of which only a shape is asked, and gives the copies their names."""
    assert isinstance(packed_region.form, RowsForm)
    copies = packed_region.form.copies
    for old in reversed(copies):
        for value in old.outputs:
            answer_needless(value, builder)
        sweep(old.outputs)
    for old, new in copies.items():
        if old.graph is not None or new.graph is None:
            continue
        new.name = old.name
        for before, after in zip(old.outputs, new.outputs, strict=True):
            before.name, after.name = after.name, before.name


class RowsPacker(Packer):
    """Packs the nodes around attentions."""

    takes_rotated = True

    def __init__(
        self, graph: GraphContext, context: BuildContext, plan_context: PlanContext, *, asked: bool, room: int | None = None
    ) -> None:
        super().__init__(graph, context, plan_context, room=room)
        self._asked = asked

    def refuse(self, spec: AttentionSpec, meaning: Meaning) -> Reason | None:
        """Why an attention cannot be packed, or None if it can, by itself."""
        axes, paddings = spec.axes, _paddings(meaning)
        assumed = self._plan_context.taken
        if not (assumed.bounded_scores and assumed.nonempty_axes):
            return Reason("not-assumed", "without bounded-scores and nonempty-axes rows of padding may not be finite")
        if spec.cache is not None:
            return Reason("cached", "keys and values are appended to earlier ones, which packed tokens cannot be")
        if length(axes.i) != length(axes.j):
            return Reason("cross-attention", "queries and keys are not proven to be of the same sequence")
        if meaning.nan is not None:
            return meaning.nan
        if not axes.b or not axes.i:
            return Reason("one-token", "there is one entry or one position, and so nothing to pack")
        if meaning.is_distrusted or not any(factors_of(item.predicate) & set(axes.b) for item in paddings):
            return Reason("nothing-to-remove", "there is no padding mask, so there is no padding to remove")
        if any(map(self._context.bounds.may_mask, meaning.biases)):
            return Reason("not-padding-only", "the bias of the scores may mask keys, too, so that rows may see none")
        given = conjoin(*(item.predicate for item in paddings))
        if len(paddings) < len(meaning.predicates) and not rows_see_themselves(meaning.allowed, spec, given):
            return Reason("not-padding-only", f"the mask is {meaning.kind}, in which a token may not see itself")
        return None

    def form(self, padding: KeyPadding, region: Region, around: Around) -> AttentionForm:
        """The form of a region; see `Packer.form`."""
        if padding.of_scores:
            raise Refused("padding-unread", "padding cannot be read from a mask that is added to the scores as it is")
        own = [value for site in region.sites for node in own_nodes(site) for value in node.outputs]
        check_shapes([value for value in own if value not in region.exits], self._context.builder)
        first = region.sites[0]
        masked = MaskedRows(Reader(region.tokens.facts), first.spec, first.meaning.predicates)
        reached = read_padding_rows(region, around, masked)
        if reached.output is not None and not self._asked:
            raise Refused(reached.output.code, reached.output.message, reached.output.node)
        if reached.output is not None and "padded-rows-unused" not in self._plan_context.taken.names:
            raise Refused("not-assumed", f"{reached.output.message}, which padded-rows-unused would allow")
        build, meanings = self._context.builder, [site.meaning for site in region.sites]
        by_first = reached.takes_first and any(len(_paddings(item)) < len(item.predicates) for item in meanings)
        if by_first:
            sees = build.slice(padding.keep, 1, 0, 1)
        else:
            sees = build.cast(build.reduce("ReduceMax", build.cast(padding.keep, ir.DataType.INT32), [1]), _TRUTH)
        keep = build.chained("Or", [padding.keep, build.elementwise("Not", [sees])])
        if reached.takes_first and not by_first:
            keep = build.chained("Or", [keep, self._first(region)])
        form = RowsForm(region, build, keep, self._room)
        form.changes_padding = reached.output is not None
        sweep([padding.clean])
        return form

    def _first(self, region: Region) -> ir.Value:
        """(1, s): the first position."""
        build = self._context.builder
        line = build.counting(region.tokens.length)
        return build.reshape(build.elementwise("Equal", [line, build.constant([0])]), [1, region.tokens.length])


def _paddings(meaning: Meaning) -> list[Padding]:
    return [item for item in meaning.predicates if isinstance(item, Padding)]
