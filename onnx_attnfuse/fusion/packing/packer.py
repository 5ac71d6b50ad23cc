"""All attentions of one graph on packed tokens, those with the same padding together; with a test, beside the usual forms.

packer = OperatorPacker(graph, context, plan_context)
regions = packer.build_region(wanted)   # beside the graph; refusals are in packer.reasons
packer.connect(region)                  # in place of the graph, or packer.fork(region, ...) with a test
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.masks.mask_terms import elements_of, value_of
from onnx_attnfuse.attention.match.candidates import Candidate, anchor_of
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.fusion.commit import inner_values
from onnx_attnfuse.fusion.packing.build_region import (
    AttentionForm,
    OperatorForm,
    PackedRegion,
    RegionBuilder,
    note,
    packed_params,
    packed_report,
)
from onnx_attnfuse.fusion.packing.padding_rows import Around, read_padding_rows
from onnx_attnfuse.fusion.packing.region import Region, Site, SiteRefused, grow, read_site
from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.plan import PlanContext
from onnx_attnfuse.fusion.plan_policy import refuse_packed
from onnx_attnfuse.fusion.report_site import unfused
from onnx_attnfuse.fusion.runtime_dispatch import Guards
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.graph.edit import answer_shapes, check_shapes, connect
from onnx_attnfuse.graph.ops import ASKS_SHAPE
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.mask_encoding import KeyPadding, read_padding
from onnx_attnfuse.transforms.rewriting import GraphContext

_PACKING = Subject("packing")


@dataclasses.dataclass(frozen=True)
class _Group:
    """Attentions with the same padding."""

    padding: KeyPadding
    sites: list[Site]
    added: tuple[tuple[ir.Node, ...], tuple[ir.Value, ...]]
    """The nodes and initializers that were built for it."""


class Packer(abc.ABC):
    """Packs one graph."""

    takes_rotated = False
    """Whether rotations of queries and keys may belong to the attention."""

    def __init__(self, graph: GraphContext, context: BuildContext, plan_context: PlanContext, *, room: int | None = None) -> None:
        """Sets it up; `room`: how many rows there are where that is fixed."""
        self._graph = graph
        self._context = context
        self._plan_context = plan_context
        self._room = room
        self.reasons: dict[int, Reason] = {}
        """Why attentions are not packed, by identity of their meaning."""

    @abc.abstractmethod
    def refuse(self, spec: AttentionSpec, meaning: Meaning) -> Reason | None:
        """Why an attention cannot be packed, or None if it can, by itself."""

    @abc.abstractmethod
    def form(self, padding: KeyPadding, region: Region, around: Around) -> AttentionForm:
        """How attention is computed in a region.

        Raises:
            Refused: A reader of the region, or its rows of padding, forbids it.
        """

    def build_region(
        self, wanted: Sequence[tuple[AttentionSpec, Meaning]], attentions: Sequence[ir.Node]
    ) -> Iterator[PackedRegion]:
        """Builds the packed region beside the graph, one after the other: each is to be connected before the next.

        Args:
            wanted: The attentions that were understood.
            attentions: A node of each attention of the graph.
        """
        around = Around(tuple(wanted), tuple(attentions), self._graph.scope.graph)
        for group in self._groups(wanted):
            packed_region = self._packed_region(group, around)
            if packed_region is not None:
                yield packed_region

    def _groups(self, wanted: Sequence[tuple[AttentionSpec, Meaning]]) -> list[_Group]:
        groups: dict[object, _Group] = {}
        for spec, meaning in wanted:
            reason = self.refuse(spec, meaning)
            if reason is not None:
                self.reasons[id(spec)] = reason
                continue
            with self._graph.rewrite(anchor_of(spec), _PACKING, spec.name) as edit:
                site = read_site(spec, meaning, rotated=self.takes_rotated)
                padding = read_padding(spec, meaning, self._context)
                if meaning.biases and padding.of_scores:
                    raise Refused("padding-unread", "padding cannot be separated from other summands of the scores")
                key = _padding_key(padding, meaning), length(spec.axes.b), length(spec.axes.i)
                if key not in groups:
                    groups[key] = _Group(padding, [], edit.keep())
                groups[key].sites.append(site)
            if edit.reason is not None:
                self.reasons[id(spec)] = edit.reason
        return list(groups.values())

    def _packed_region(self, group: _Group, around: Around) -> PackedRegion | None:
        """Builds a group, or notes why not."""
        first = group.sites[0].spec
        with self._graph.rewrite(anchor_of(first), _PACKING, first.name) as edit:
            edit.adopt(*group.added)
            scope = self._graph.scope
            tokens = Tokens(scope.facts, length(first.axes.b), length(first.axes.i))
            region = self._grown(group.sites, tokens)
            inner = {*region.inner, *(value for site in region.sites for value in inner_values(site.spec))}
            check_shapes(list(inner - region.exits.keys()), self._context.builder)
            self._context.builder.at(anchor_of(first))
            built = RegionBuilder(region, self.form(group.padding, region, around), self._graph).build()
            edit.keep()
            return built
        assert edit.reason is not None
        self.reasons.update(dict.fromkeys((id(site.spec) for site in group.sites), edit.reason))
        return None

    def _grown(self, sites: list[Site], tokens: Tokens) -> Region:
        """The region around as many of `sites` as are of a sequence with itself.

        Raises:
            Refused: None is, or they cannot be packed.
        """
        try:
            return grow(sites, self._graph.scope.graph, tokens)
        except SiteRefused as refused:
            reason, site = refused.reason, refused.site
        if len(sites) == 1:
            raise Refused(reason.code, reason.message, reason.node)
        self.reasons[id(site.spec)] = reason
        sites.remove(site)
        return self._grown(sites, tokens)

    def connect(self, packed_region: PackedRegion) -> None:
        """Puts packed values in the place of the old ones and removes unused nodes."""
        builder = self._context.builder
        self._answer(packed_region.region)
        for old, new in packed_region.restored.items():
            asking = [node for node, _ in old.uses() if node.op_type in ASKS_SHAPE and node not in packed_region.added]
            connect(old, new, builder, [*packed_region.region.readers[old], *asking])
        sweep([packed_region.form.given, *reversed(packed_region.region.inner), *packed_region.restored])

    def _answer(self, region: Region) -> None:
        """Whoever asks for the shape of an inner value gets it from elsewhere."""
        inner = (*region.inner, *(value for site in region.sites for value in inner_values(site.spec)))
        for value in inner:
            if value.graph is not None and value not in region.exits:
                answer_shapes(value, self._context.builder)


class OperatorPacker(Packer):
    """Packs attentions by PackedMultiHeadAttention."""

    @property
    def is_assumed(self) -> bool:
        """Whether padding may be assumed on the right without a test."""
        return self._room is not None or "right_padded" in self._plan_context.assumed

    def refuse(self, spec: AttentionSpec, meaning: Meaning) -> Reason | None:
        """Why an attention cannot be packed, or None if it can, by itself."""
        reason = packed.refuse(spec, meaning, self._context)
        if reason is None and not (self.is_assumed or self._plan_context.may_test):
            message = "packed is exact for padding on the right only, and --padding exact allows no run-time check"
            return Reason("not-every-batch", message)
        if reason is None and self._room is not None and meaning.biases:
            return Reason("not-every-batch", "the bias of the scores is that of packed tokens for padding on the right only")
        return reason

    def form(self, padding: KeyPadding, region: Region, around: Around) -> AttentionForm:
        """The form of a region; see `Packer.form`."""
        reached = read_padding_rows(region, around)
        if self._room is not None and padding.of_scores:
            raise Refused("padding-unread", "padding cannot be read from a mask that is added to the scores as it is")
        if self._room is not None and "padded-rows-unused" not in self._plan_context.taken.names:
            raise Refused("not-assumed", "rows of padding change, which padded-rows-unused would allow")
        form = OperatorForm(region.tokens, self._context, padding, self._room)
        form.changes_padding = reached.output is not None
        return form

    def fork(self, packed_region: PackedRegion, guards: Guards, moved: Mapping[ir.Value, ir.Value]) -> None:
        """Takes packed values where padding is on the right, else the old ones.

        Args:
            packed_region: The packed region.
            guards: The tests of the graph.
            moved: The replacements of old values.
        """
        builder = self._context.builder
        self._answer(packed_region.region)
        last = next(reversed(list(builder.graph)))
        builder.at(last)
        olds = [moved.get(old, old) for old in packed_region.restored]
        assert packed_region.form.given is not None
        chosen = guards.fork(packed_region.form.given, list(packed_region.restored.values()), olds)
        for old, other, new in zip(packed_region.restored, olds, chosen, strict=True):
            connect(other, new, builder, packed_region.region.readers[old])


def _padding_key(padding: KeyPadding, meaning: Meaning) -> object:
    """A key that equal paddings share: their values, or the mask's formula where each mask is computed anew."""
    if not padding.of_scores:
        return padding.keep, padding.clean
    return meaning.text, frozenset(map(value_of, elements_of(meaning.allowed)))


def takes_all(fuser: SiteFuser, candidates: Sequence[Candidate], plan_context: PlanContext, room: int | None) -> bool:
    """Whether PackedMultiHeadAttention takes all attentions that were understood."""
    packer, build = OperatorPacker(fuser.graph, fuser.context, plan_context, room=room), fuser.context.builder
    for spec in [candidate.spec for candidate in candidates if candidate.spec is not None]:
        build.at(anchor_of(spec))
        if packer.refuse(spec, understand(spec, fuser.context.reader)) is not None:
            return False
    return True


def pack(
    fuser: SiteFuser, candidates: Sequence[Candidate], plan_context: PlanContext, room: int | None = None
) -> tuple[list[SiteReport], list[str]]:
    """Packs the attentions of one graph; returns a report on each candidate, and a line on each group.

    Attentions in a branch are not packed: they may be the usual forms beside packed ones.

    Args:
        fuser: The fuser.
        candidates: The attentions.
        plan_context: The context of their plans.
        room: How many rows there are, where that is fixed.
    """
    usual = dataclasses.replace(plan_context, target="auto", padding="exact")
    scope = fuser.graph.scope
    if scope.graph is not fuser.graph.model.graph and not scope.is_function:
        return [fuser.fuse(candidate, usual) for candidate in candidates], []
    packer = OperatorPacker(fuser.graph, fuser.context, plan_context, room=room)
    found = [unfused(candidate, scope) for candidate in candidates]
    wanted: dict[int, tuple[AttentionSpec, Meaning]] = {}
    for place, candidate in enumerate(candidates):
        if candidate.spec is not None:
            fuser.context.builder.at(anchor_of(candidate.spec))
            meaning = fuser.graph.check_mask(candidate.spec, understand(candidate.spec, fuser.context.reader))
            found[place] = dataclasses.replace(found[place], mask=meaning.kind, mask_text=meaning.text or None)
            fuser.album.mask(candidate.node, candidate.spec, meaning, fuser.graph.scope)
            wanted[place] = candidate.spec, meaning
            problem = functools.partial(packed_params, candidate.spec, meaning, plan_context)
            is_taken = packed.refuse(candidate.spec, meaning, fuser.context) is None
            if is_taken and (unwanted := refuse_packed(problem(), fuser.policy, plan_context.device)):
                found[place] = dataclasses.replace(found[place], reasons=unwanted)
                del wanted[place]
    places = {id(spec): place for place, (spec, _) in wanted.items()}
    notes: list[str] = []
    for packed_region in packer.build_region(list(wanted.values()), [item.node for item in candidates]):
        others: dict[int, SiteReport] = {}
        where = ", assumed on the right," if packer.is_assumed else ", where it is on the right,"
        notes.append(note(packed_region, where if room is None else f", into {room} rows,"))
        if packer.is_assumed:
            packer.connect(packed_region)
        else:
            for place in [places[id(site.spec)] for site in packed_region.region.sites]:
                others[place] = fuser.fuse(candidates[place], usual)
            packer.fork(packed_region, fuser.guards, fuser.replaced)
        for site in packed_region.region.sites:
            place = places[id(site.spec)]
            found[place] = packed_report(found[place], packed_region, site, plan_context, others.get(place))
            if (attended := packed_region.form.attended.get(site)) is not None:
                fuser.album.packed(candidates[place].node, attended.node, attended.value, fuser.graph.scope)
        fuser.unsorted = True
    for place, (spec, _) in wanted.items():
        reason = packer.reasons.get(id(spec))
        if reason is not None:
            found[place] = dataclasses.replace(found[place], reasons=(reason,))
    return found, notes
