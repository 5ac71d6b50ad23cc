"""Report records of packed attentions, and a line on each packed region."""

from __future__ import annotations

import dataclasses

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.packing.build_region import PackedRegion
from onnx_attnfuse.fusion.packing.forms import OperatorForm
from onnx_attnfuse.fusion.packing.region import Region, Site
from onnx_attnfuse.fusion.plan import PlanContext, params_of
from onnx_attnfuse.fusion.report_kernel import kernel_of_forecast
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.forecast import forecast
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.targets import multi_head_attention, packed
from onnx_attnfuse.targets.base import MaskEncoding
from onnx_attnfuse.targets.packed import PackedResult

_WHEN = "padding is on the right"
_MAX_LISTED_NAMES = 3
_SHAPE_ONLY = Reason("shape-used", "only the shape of its result is used, which packing does not need")


def attended_in(packed_region: PackedRegion) -> dict[Site, PackedResult]:
    """The operators that attentions of a region became."""
    return packed_region.form.attended if isinstance(packed_region.form, OperatorForm) else {}


def packed_params(spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext) -> AttentionParams:
    """Parameters of an attention on packed tokens, for the forecast of its kernel."""
    params = params_of(spec, MaskEncoding("bias" if meaning.biases else "none", when="right_padded"), multi_head_attention)
    return dataclasses.replace(params, op=packed.INFO.key).settled(plan_context.lengths)


def packed_report(
    found: SiteReport, packed_region: PackedRegion, site: Site, plan_context: PlanContext, usual: SiteReport | None
) -> SiteReport:
    """The report on one attention.

    Args:
        found: What was known before.
        packed_region: What was built.
        site: The attention.
        plan_context: What it was planned for.
        usual: What computes it where padding is not on the right; None if it is taken to be.
    """
    attended = attended_in(packed_region).get(site)
    if attended is None:
        return usual or dataclasses.replace(found, reasons=(_SHAPE_ONLY,))
    form = "packed + attention_bias" if site.meaning.biases else "packed"
    forecast_packed = forecast(packed_params(site.spec, site.meaning, plan_context), plan_context.device)
    form = form if usual is None else f"{form}, else {usual.mask_form or 'spelled out'}"
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


def note(region: Region, where: str) -> str:
    """A line on what is packed together, its values still called as they are in the source."""
    removed = _listed(sorted(value.name or "" for value in region.entries))
    restored = _listed(sorted(value.name or "" for value in region.exits))
    what = f"padding{where} is removed from {removed} and restored as 0 in {restored}"
    readers = sorted({node.op_type for found in region.readers.values() for node in found})
    return f"{what}, which {_listed(readers)} reads" if readers else what


def _listed(names: list[str]) -> str:
    shown = names[:_MAX_LISTED_NAMES] + (["…"] if len(names) > _MAX_LISTED_NAMES else [])
    return ", ".join(f"'{name}'" if name != "…" else name for name in shown)
