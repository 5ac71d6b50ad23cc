"""What the report tells of packed attentions."""

from __future__ import annotations

import dataclasses

from onnx_attnfuse.conditions import Problem
from onnx_attnfuse.kernels import Forecast, forecast
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.packing.region import Region, Site
from onnx_attnfuse.packing.weave import Woven
from onnx_attnfuse.plan import Planning, problem_of
from onnx_attnfuse.report.model import Kernel, LaterKernel, RefusedKernel, SiteReport
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import multi_head_attention, packed
from onnx_attnfuse.targets.emitted import Way

_WHEN = "padding is on the right"
_FEW = 3


def packed_problem(spec: AttentionSpec, meaning: Meaning, planning: Planning) -> Problem:
    """What the kernel on packed tokens is asked to do."""
    problem = problem_of(spec, Way("bias" if meaning.biases else "none", when="right_padded"), multi_head_attention)
    return dataclasses.replace(problem, op=packed.OP).settled(planning.lengths)


def told(found: SiteReport, woven: Woven, site: Site, planning: Planning, usual: SiteReport | None) -> SiteReport:
    """The report on one attention.

    Args:
        found: What was known before.
        woven: What was built.
        site: The attention.
        planning: What it was planned for.
        usual: What computes it where padding is not on the right; None if it is taken to be.
    """
    attended = woven.attended[site]
    form = "packed + attention_bias" if site.meaning.biases else "packed"
    form = form if usual is None else f"{form}, else {usual.mask_form or 'spelled out'}"
    return dataclasses.replace(
        found,
        status="fused",
        op=packed.OP,
        domain=packed.DOMAIN,
        scale=attended.scale,
        mask_form=form,
        kernel=_kernel(site, planning, usual),
        layout=attended.layouts,
        verified=woven.verified[site],
        reasons=() if usual is None else usual.reasons,
    )


def _kernel(site: Site, planning: Planning, usual: SiteReport | None) -> Kernel:
    chain: list[LaterKernel] = []
    first = forecast(packed_problem(site.spec, site.meaning, planning), planning.device)
    following: Forecast | None = first
    while following is not None:
        words = [word for word in (_WHEN, following.needs) if word]
        chain.append(LaterKernel(following.kernel, " and ".join(words)))
        following = following.otherwise
    if usual is not None and usual.kernel is not None:
        chain += [LaterKernel(usual.kernel.forecast, usual.kernel.when), *usual.kernel.otherwise]
    refused = tuple(RefusedKernel(item.kernel, item.reason.code, item.reason.message) for item in first.refused)
    return Kernel(planning.device.name, chain[0].kernel, chain[0].when, tuple(chain[1:]), refused)


def note(region: Region, *, vouched: bool) -> str:
    """A line on what is packed together, its values still called as they are in the source."""
    removed = _listed(sorted(value.name or "" for value in region.entries))
    restored = _listed(sorted(value.name or "" for value in region.exits))
    where = "taken to be on the right" if vouched else "where it is on the right"
    what = f"padding, {where}, is removed from {removed} and restored as 0 in {restored}"
    readers = sorted({node.op_type for found in region.readers.values() for node in found})
    return f"{what}, which {_listed(readers)} reads" if readers else what


def _listed(names: list[str]) -> str:
    shown = names[:_FEW] + (["…"] if len(names) > _FEW else [])
    return ", ".join(f"'{name}'" if name != "…" else name for name in shown)
