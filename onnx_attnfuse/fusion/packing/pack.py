"""The attentions of one graph packed together, where that is asked for; with a test the usual forms are kept beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.match.candidates import Candidate, anchor_of
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.packing.build_region import attended_in, note, packed_params, packed_report
from onnx_attnfuse.fusion.packing.packer import OperatorPacker
from onnx_attnfuse.fusion.plan import PlanContext
from onnx_attnfuse.fusion.plan_policy import refuse_packed
from onnx_attnfuse.fusion.report_site import unfused
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.packed import PackedResult


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
            if packed.refuse(candidate.spec, meaning, fuser.context) is None:
                unwanted = refuse_packed(packed_params(candidate.spec, meaning, plan_context), fuser.policy, plan_context.device)
                if unwanted:
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
            _draw(fuser, candidates[place], attended_in(packed_region).get(site))
        fuser.unsorted = True
    for place, (spec, _) in wanted.items():
        reason = packer.reasons.get(id(spec))
        if reason is not None:
            found[place] = dataclasses.replace(found[place], reasons=(reason,))
    return found, notes


def _draw(fuser: SiteFuser, candidate: Candidate, attended: PackedResult | None) -> None:
    """Draws the packed attentions, if any."""
    if attended is not None:
        fuser.album.packed(candidate.node, attended.node, attended.value, fuser.graph.scope)
