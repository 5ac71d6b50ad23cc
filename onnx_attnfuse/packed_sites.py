"""The attentions of one graph packed together, where that is asked for; behind a test the usual forms stand beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from onnx_attnfuse.masks.meaning import Meaning, understand
from onnx_attnfuse.match.finder import Candidate, anchor_of
from onnx_attnfuse.packing.step import Packing
from onnx_attnfuse.packing.told import note, packed_problem, told
from onnx_attnfuse.plan import Planning
from onnx_attnfuse.preference import refuse_packed
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.report.site import unfused
from onnx_attnfuse.sites import Sites
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import packed


def pack(sites: Sites, candidates: Sequence[Candidate], planning: Planning) -> tuple[list[SiteReport], list[str]]:
    """Packs what can be packed of one graph; returns a report on each candidate, and a line on each group."""
    packing = Packing(sites.scope, sites.model, sites.bench, sites.court, planning)
    found = [unfused(candidate, sites.scope) for candidate in candidates]
    wanted: dict[int, tuple[AttentionSpec, Meaning]] = {}
    for place, candidate in enumerate(candidates):
        if candidate.spec is not None:
            sites.bench.builder.at(anchor_of(candidate.spec))
            meaning = sites.court.trusted(
                candidate.spec, understand(candidate.spec, sites.bench.reader), sites.scope, sites.model
            )
            found[place] = dataclasses.replace(found[place], mask=meaning.kind, mask_text=meaning.text or None)
            sites.album.mask(candidate.node, candidate.spec, meaning, sites.scope)
            wanted[place] = candidate.spec, meaning
            if packed.refuse(candidate.spec, meaning, sites.bench) is None:
                unwanted = refuse_packed(packed_problem(candidate.spec, meaning, planning), sites.policy, planning.device)
                if unwanted:
                    found[place] = dataclasses.replace(found[place], reasons=unwanted)
                    del wanted[place]
    places = {id(spec): place for place, (spec, _) in wanted.items()}
    usual = dataclasses.replace(planning, target="auto", padding="exact")
    notes: list[str] = []
    for woven in packing.weave(list(wanted.values()), [item.node for item in candidates]):
        others: dict[int, SiteReport] = {}
        notes.append(note(woven.region, vouched=packing.is_vouched))
        if packing.is_vouched:
            packing.connect(woven)
        else:
            for place in [places[id(site.spec)] for site in woven.region.sites]:
                others[place] = sites.fuse(candidates[place], usual)
            packing.fork(woven, sites.guards, sites.replaced)
        for site in woven.region.sites:
            place = places[id(site.spec)]
            found[place] = told(found[place], woven, site, planning, others.get(place))
            attended = woven.attended[site]
            sites.album.packed(candidates[place].node, attended.node, attended.value, sites.scope)
        sites.unsorted = True
    for place, (spec, _) in wanted.items():
        reason = packing.reasons.get(id(spec))
        if reason is not None:
            found[place] = dataclasses.replace(found[place], reasons=(reason,))
    return found, notes
