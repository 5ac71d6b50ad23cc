"""Plans for an attention filtered by the kernel policy: flash, memory-efficient, fallback.

Preferences are tried in order, attention by attention; the first that a plan satisfies wins. Where none does, the attention stays
as it is, with the reasons why every wanted kernel was refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.plan import Plan, PlanContext, make_plans, params_of
from onnx_attnfuse.kernels.conditions import MOST_SCORES, AttentionParams
from onnx_attnfuse.kernels.device import NOTHING_SAID, Device
from onnx_attnfuse.kernels.forecast import EFFICIENT, FLASH, Forecast, forecast_existing, has_kernel, untimed
from onnx_attnfuse.kernels.policy import KernelPreference, Policy
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets import name_of
from onnx_attnfuse.targets.base import BuildContext

WANTED: Mapping[KernelPreference, frozenset[str]] = {"flash": FLASH, "efficient": EFFICIENT}
"""The kernels that a wish is for."""
_WORDS: Mapping[KernelPreference, str] = {"flash": "flash", "efficient": "memory-efficient"}


def preferred_plans(
    spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext, policy: Policy, context: BuildContext
) -> tuple[list[Plan], list[Reason]]:
    """The plans that the policy allows, the fastest first, and why there are not others."""
    plans, refusals = make_plans(spec, meaning, plan_context, context)
    if not policy.wishes:
        return _safe(plans, refusals, spec, plan_context)
    refused: list[Reason] = []
    for preference in policy.wishes:
        found, reasons = _preferred(preference, plans, spec, meaning, plan_context, context)
        found, reasons = _safe(found, reasons, spec, plan_context)
        if found:
            return found, []
        refused += reasons
    return [], list(dict.fromkeys(refused + (refusals if not plans else [])))


def _preferred(
    preference: KernelPreference,
    plans: Sequence[Plan],
    spec: AttentionSpec,
    meaning: Meaning,
    plan_context: PlanContext,
    context: BuildContext,
) -> tuple[list[Plan], list[Reason]]:
    """The plans that fulfil one wish, or why there are none."""
    if preference == "sdpa_fallback":
        if meaning.is_trivial and not spec.causal:
            return list(plans), []
        return [], [Reason("masked", f"the fallback takes attention without a mask only, and the mask is {meaning.kind}")]
    found, refusals = make_plans(spec, meaning, dataclasses.replace(plan_context, kernels=WANTED[preference]), context)
    if found or not plans:
        return found, [] if found else refusals
    main = plans[0].main  # the operator that would be planned otherwise
    return found, list(_lacking(preference, main.forecast, name_of(main.target), plan_context.device)) or refusals


def _lacking(preference: KernelPreference, found: Forecast, op: str, device: Device) -> Iterator[Reason]:
    """Reasons why no wanted kernel runs an operator for which others are forecast."""
    words, wanted = _WORDS[preference], WANTED[preference]
    if not has_kernel(op, device, wanted):
        yield Reason("no-such-kernel", f"{op} has no {words} kernel on {device.name}")
        return
    refused = [item for item in found.refused if item.kernel in wanted]
    for item in refused:
        yield Reason(item.code, f"no {words} attention: {item.kernel} {item.message}")
    if not refused:
        yield Reason("other-kernel", f"no {words} attention: {found.kernel} comes before it")


def refuse_packed(params: AttentionParams, policy: Policy, device: Device) -> tuple[Reason, ...]:
    """Why the policy leaves no packed attention; the fallback never has one, as there is padding."""
    if not (policy.wishes or device.switches.off):
        return ()
    found = untimed(params, device)
    kinds: list[KernelPreference] = [preference for preference in policy.wishes if preference in WANTED]
    if policy.wishes and not any(found.kernel in WANTED[preference] for preference in kinds):
        reasons = [reason for preference in kinds for reason in _lacking(preference, found, params.op, device)]
        return tuple(reasons) or (Reason("masked", "the fallback takes attention without a mask only, and there is padding"),)
    danger = endangered(params, device)
    return () if danger is None else (danger,)


def _safe(
    plans: Sequence[Plan], refusals: list[Reason], spec: AttentionSpec, plan_context: PlanContext
) -> tuple[list[Plan], list[Reason]]:
    """The plans that fail at no size because kernels are switched off, and why the others may."""
    safe: list[Plan] = []
    for plan in plans:
        problems = [params_of(spec, item.encoding, item.target) for item in (plan.main, *plan.faster)]
        dangers = [danger for params in problems if (danger := endangered(params, plan_context.device)) is not None]
        refusals = dangers[:1] + refusals
        if not dangers:
            safe.append(plan)
    return safe, refusals


def needs_all_kernels(params: AttentionParams | Reason, device: Device) -> bool:
    """Whether an operator of the model may fail because kernels are switched off; if unknown, it may."""
    if not device.lacks_kernels:
        return False
    if isinstance(params, Reason) or forecast_existing(params, device) is None:
        return True
    return endangered(params, device) is not None


def endangered(params: AttentionParams, device: Device) -> Reason | None:
    """Why a problem may fail at some size only because kernels are switched off, or None."""
    known = support(params.op, device.provider)
    if not device.lacks_kernels or isinstance(known, Reason):
        return None
    found = untimed(params, device)
    left_alone = untimed(params, dataclasses.replace(device, switches=NOTHING_SAID))
    if "MATH" not in found.chain or found.chain == left_alone.chain:
        return None
    few = isinstance(params.scores, int) and params.scores < MOST_SCORES
    if known.math_is_safe is None or not (known.math_is_safe or (few and found.never_fails)):
        message = f"without {left_alone.kernel} it may reach the math kernel, which is unsafe at some sizes"
        return Reason("unsafe-switch", message)
    return None
