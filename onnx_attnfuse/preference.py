"""What a policy leaves of the plans for an attention, and why not more.

Wishes are tried in order, attention by attention. A plan of the first that has one is carried out; where none has, the attention
stays as it is, with what every wanted kernel has against it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from onnx_attnfuse.conditions import Problem
from onnx_attnfuse.devices import NOTHING_SAID, Device
from onnx_attnfuse.kernels import EFFICIENT, FLASH, MOST_SCORES, Forecast, forecast_standing, has_kernel, untimed
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.plan import Plan, Planning, make_plans, problem_of
from onnx_attnfuse.policy import Policy, Wish
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import name_of
from onnx_attnfuse.targets.emitted import Workbench

WANTED: Mapping[Wish, frozenset[str]] = {"flash": FLASH, "efficient": EFFICIENT}
"""The kernels that a wish is for."""
_WORDS: Mapping[Wish, str] = {"flash": "flash", "efficient": "memory-efficient"}
_CRASHES = frozenset(["MultiHeadAttention", "Attention"])
"""Operators whose math kernel ends the process from so many scores on."""
_UNPROVEN = frozenset(["GroupQueryAttention", "PackedMultiHeadAttention"])
"""Operators of whose math kernel nothing is known."""


def preferred_plans(
    spec: AttentionSpec, meaning: Meaning, planning: Planning, policy: Policy, bench: Workbench
) -> tuple[list[Plan], list[Reason]]:
    """The plans that the policy allows, the fastest first, and why there are not others."""
    plans, refusals = make_plans(spec, meaning, planning, bench)
    if not policy.wishes:
        return _safe(plans, refusals, spec, planning)
    refused: list[Reason] = []
    for wish in policy.wishes:
        found, reasons = _wished(wish, plans, spec, meaning, planning, bench)
        found, reasons = _safe(found, reasons, spec, planning)
        if found:
            return found, []
        refused += reasons
    return [], list(dict.fromkeys(refused + (refusals if not plans else [])))


def _wished(
    wish: Wish, plans: Sequence[Plan], spec: AttentionSpec, meaning: Meaning, planning: Planning, bench: Workbench
) -> tuple[list[Plan], list[Reason]]:
    """The plans that fulfil one wish, or why there are none."""
    if wish == "sdpa_fallback":
        if meaning.is_trivial and not spec.causal:
            return list(plans), []
        return [], [Reason("masked", f"the fallback takes attention without a mask only, and the mask is {meaning.kind}")]
    found, refusals = make_plans(spec, meaning, dataclasses.replace(planning, kernels=WANTED[wish]), bench)
    return found, [] if found else list(_against(wish, plans, planning)) or refusals


def _against(wish: Wish, plans: Sequence[Plan], planning: Planning) -> Iterator[Reason]:
    """What every wanted kernel has against the operator that would be planned otherwise."""
    if plans:
        main = plans[0].main
        yield from _lacking(wish, main.forecast, name_of(main.target), planning.device)


def _lacking(wish: Wish, found: Forecast, op: str, device: Device) -> Iterator[Reason]:
    """What the wanted kernels have against an operator for which others are forecast."""
    words, wanted = _WORDS[wish], WANTED[wish]
    if not has_kernel(op, device, wanted):
        yield Reason("no-such-kernel", f"{op} has no {words} kernel on {device.name}")
        return
    refused = [item for item in found.refused if item.kernel in wanted]
    for item in refused:
        yield Reason(item.reason.code, f"no {words} attention: {item.kernel} {item.reason.message}")
    if not refused:
        yield Reason("other-kernel", f"no {words} attention: {found.kernel} comes before it")


def refuse_packed(problem: Problem, policy: Policy, device: Device) -> tuple[Reason, ...]:
    """Why the policy leaves no packed attention; the fallback never has one, as there is padding."""
    if device.ep == "cpu" or not (policy.wishes or device.switches.off):
        return ()
    found = untimed(problem, device)
    kinds: list[Wish] = [wish for wish in policy.wishes if wish in WANTED]
    if policy.wishes and not any(found.kernel in WANTED[wish] for wish in kinds):
        reasons = [reason for wish in kinds for reason in _lacking(wish, found, problem.op, device)]
        return tuple(reasons) or (Reason("masked", "the fallback takes attention without a mask only, and there is padding"),)
    danger = endangered(problem, device)
    return () if danger is None else (danger,)


def _safe(
    plans: Sequence[Plan], refusals: list[Reason], spec: AttentionSpec, planning: Planning
) -> tuple[list[Plan], list[Reason]]:
    """The plans that fail at no size because kernels are switched off, and why the others may."""
    safe: list[Plan] = []
    for plan in plans:
        problems = [problem_of(spec, item.way, item.target) for item in (plan.main, *plan.faster)]
        dangers = [danger for problem in problems if (danger := endangered(problem, planning.device)) is not None]
        refusals = dangers[:1] + refusals
        if not dangers:
            safe.append(plan)
    return safe, refusals


def needs_all_kernels(problem: Problem | Reason, device: Device) -> bool:
    """Whether an operator that stands in the model may fail because kernels are switched off; if unknown, it may."""
    if device.ep == "cpu" or not device.switches.off:
        return False
    if isinstance(problem, Reason) or forecast_standing(problem, device) is None:
        return True
    return endangered(problem, device) is not None


def endangered(problem: Problem, device: Device) -> Reason | None:
    """Why a problem may fail at some size only because kernels are switched off, or None."""
    if not device.switches.off or device.ep == "cpu":
        return None
    found = untimed(problem, device)
    left_alone = untimed(problem, dataclasses.replace(device, switches=NOTHING_SAID))
    if "MATH" not in found.chain or found.chain == left_alone.chain:
        return None
    few = isinstance(problem.scores, int) and problem.scores < MOST_SCORES
    if problem.op in _UNPROVEN or (problem.op in _CRASHES and not (few and found.never_fails)):
        message = f"without {left_alone.kernel} it may reach the math kernel, which is not known to be safe at every size"
        return Reason("unsafe-switch", message)
    return None
