"""Choosing the operator for one attention, and the ways to pass its mask; every refusal is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.erased_nan import erased_nan
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS, Assumed
from onnx_attnfuse.kernels.conditions import MOST_SCORES, AttentionParams, MaskForm
from onnx_attnfuse.kernels.conformance import Conformance, Form
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.forecast import Forecast, Speedup, forecast, unfused_time
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.options import PaddingPolicy, TargetName
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets import TARGETS, UNFUSED, Target, name_of, packed
from onnx_attnfuse.targets.base import BuildContext, MaskEncoding, Precondition
from onnx_attnfuse.targets.layout import shared_heads
from onnx_attnfuse.targets.mask_encoding import is_given

_MEASUREMENT_NOISE = 1.1
_UNFUSED_FROM, _UNFUSED_TO = 1 << 26, MOST_SCORES
"""Between these numbers of scores, b·n·s·t, decomposed attention may be faster; beyond, its memory counts."""
_WORTHWHILE_SHARE_OF_TIME = 0.85
"""Another way is taken if it needs at most this part of the time."""
FASTER_FROM: Mapping[MaskForm, int] = {"lengths": 1 << 23, "ranges": 1 << 21, "none": 0}
"""From this many scores on, b·n·s·t, a way is faster than a bias."""
GUARDED_FROM = 1 << 32
"""From this many scores on, b·n·s·t, a faster way spares more memory than its test takes (decision 0018)."""
_ASSUMED_EXACT: Mapping[PaddingPolicy, frozenset[Precondition]] = {
    "assume-right": frozenset(["right_padded"]),
    "assume-none": frozenset(["always", "right_padded", "unpadded"]),
}
"""The batches that a caller vouches for."""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """One candidate lowering of an attention: an operator, an encoding of the mask, and the kernel forecast for both."""

    target: Target
    encoding: MaskEncoding
    forecast: Forecast

    @property
    def time(self) -> float:
        """Forecast time of the kernel."""
        return self.forecast.time


@dataclasses.dataclass(frozen=True)
class Plan:
    """The operators that will compute an attention: one for every batch, and faster ones with tests."""

    main: Lowering
    """Exact for every batch, or for those that the caller vouches for."""
    faster: tuple[Lowering, ...] = ()
    """Exact for some batches, which a test at run time tells; the fastest first."""
    gains: tuple[Speedup, ...] = ()

    @property
    def best(self) -> Lowering:
        """The fastest way of all."""
        return self.faster[0] if self.faster else self.main


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """Everything besides the attention that a plan depends on: the device and the choices of the caller.

    Raises:
        OptionError: A choice does not exist, or a length is none.
    """

    device: Device
    padding: PaddingPolicy = "auto"
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Numbers that symbolic sizes will have; they affect speed, never exactness."""
    always: bool = False
    """Fuse also where the decomposed form is faster."""
    target: TargetName = "auto"
    """The only operator to use, whatever is faster; `auto`: the fastest."""
    kernels: frozenset[str] | None = None
    """The only kernels that may be forecast; None: any."""
    dtype: ir.DataType | None = None
    """Plan as if attention was computed in this type; the built nodes have its own type all the same, and are of no use."""
    taken: Assumed = dataclasses.field(default_factory=Assumed)
    """The assumptions."""
    provable: bool = False
    """Forms that certificates cannot prove are left out."""
    captured: bool = False
    """The model is to be captured, so that nothing is tested at run time."""
    conformance: Conformance | None = None
    """The forms that failed on the execution provider when they were tried; None: none are known."""

    def __post_init__(self) -> None:
        names = ("auto", *map(name_of, TARGETS), packed.NAME)
        if self.target not in names:
            raise OptionError(f"target is {self.target!r}; choose {', '.join(names)}")
        if self.padding not in get_args(PaddingPolicy):
            raise OptionError(f"padding is {self.padding!r}; choose {', '.join(get_args(PaddingPolicy))}")
        for name, number in self.lengths.items():
            if number < 1:
                raise OptionError(f"dim {name!r} is {number}; choose a length of 1 or more")

    @property
    def fixed(self) -> Mapping[str, int]:
        """Numbers that symbolic sizes will always have."""
        return self.lengths if self.captured else {}

    @property
    def may_test(self) -> bool:
        """Whether a form that is exact for some batches may be chosen by a test at run time."""
        return not self.captured and self.padding != "exact" and bool(self.device.provider.takes_if)

    @property
    def assumed(self) -> frozenset[Precondition]:
        """The batches that the caller vouches for."""
        return _ASSUMED_EXACT.get(self.padding, frozenset())


def make_plans(
    spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext, context: BuildContext
) -> tuple[list[Plan], list[Reason]]:
    """A plan for each target that takes `spec`, the fastest first, and why the others do not.

    Where one target is asked for, others serve for the batches that it does not take, and only then. Nothing is taken for granted
    of padding that the model does not read off its inputs.
    """
    if plan_context.assumed and not is_given(meaning):
        plan_context = dataclasses.replace(plan_context, padding="auto")
    forms = TARGETS if plan_context.device.provider.unfused_form is None else (*TARGETS, UNFUSED)
    chosen, provider = plan_context.target, plan_context.device.provider
    asked = [item for item in forms if (_is_default(item, plan_context) if chosen == "auto" else name_of(item) == chosen)]
    if chosen == "auto" and all(isinstance(support(name_of(target), provider), Reason) for target in asked):
        message = f"no fused kernel on {plan_context.device.ep} is known to be both correct and faster"
        return [], [Reason("no-kernel-for-device", message)]
    if (lost := erased_nan(spec, context.builder.facts)) is not None:
        return [], [lost]
    refused = {name_of(target): _refusal(target, spec, meaning, context) for target in asked}
    takers = [target for target in asked if refused[name_of(target)] is None]
    partly = (
        takers and plan_context.target != "auto" and not any(encoding.is_exact for encoding in takers[0].encodings(spec, meaning))
    )
    if partly and plan_context.may_test:
        others = [target for target in TARGETS if target not in takers and _is_default(target, plan_context)]
        takers += [target for target in others if _refusal(target, spec, meaning, context) is None]
    plans: list[Plan] = []
    for target, plan in _plans(takers, spec, meaning, plan_context):
        if isinstance(plan, Reason):
            refused[name_of(target)] = plan
        else:
            plans.append(dataclasses.replace(plan, gains=tuple(_gains(plan, takers, spec, meaning, plan_context))))
    plans.sort(key=lambda plan: (plan.best.time, plan.main.time))
    return plans, [reason for reason in refused.values() if reason is not None]


def _refusal(target: Target, spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Reason | None:
    """Why a target does not take `spec`; one that fails at the question does not, and the others are asked all the same."""
    with contained(Subject(f"asking {name_of(target)}"), spec.name) as attempt:
        return target.refuse(spec, meaning, context)
    return attempt.reason


def _is_default(target: Target, plan_context: PlanContext) -> bool:
    """Whether a target is considered where nobody asks for it.

    The refusal of one without a kernel is reported, unless its own record says which providers it is for.
    """
    found = support(name_of(target), plan_context.device.provider)
    return not target.INFO.support if isinstance(found, Reason) else found.by_default


def _plans(
    takers: Sequence[Target], spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext
) -> Iterator[tuple[Target, Plan | Reason]]:
    """A plan for each target that has a way for every batch, with the faster ways of all; why not, if it alone is asked for."""
    found, wrong = _lowerings(takers, spec, meaning, plan_context)
    if plan_context.kernels is not None:
        found = [item for item in found if item.forecast.kernel in plan_context.kernels]
    some = [item for item in found if not item.encoding.is_exact and not math.isinf(item.time)]
    if plan_context.target != "auto":
        some = [item for item in some if name_of(item.target) == plan_context.target]
    some.sort(key=lambda item: item.time)
    exact = [item for item in found if item.encoding.is_exact]
    if plan_context.target == "auto" and any(item.encoding.cached for item in exact):
        exact = _appending(exact, spec, plan_context)
    for target in takers:
        always = [item for item in exact if item.target is target]
        if always:
            together = [item for item in some if item.target is target or not (target.ALONE or item.target.ALONE)]
            whole = [item for item in always if item.encoding.band is None]  # blocks may be refused when they are built
            best = dict.fromkeys(min(forms, key=lambda item: item.time) for forms in (always, whole) if forms)
            yield from ((target, _plan(main, together, spec, plan_context)) for main in best)
        elif plan_context.kernels is not None and (assumed := _vouched(target, some, spec, plan_context)) is not None:
            yield target, Plan(assumed)
        elif name_of(target) in wrong:
            yield target, wrong[name_of(target)]
        elif plan_context.target == name_of(target) and len(takers) == 1:
            yield (
                target,
                Reason(
                    "not-every-batch",
                    f"{plan_context.target} is exact for some batches only, and --padding exact allows no run-time check",
                ),
            )
        elif not all(_is_taken(encoding, target, plan_context.device) for encoding in target.encodings(spec, meaning)):
            ep = plan_context.device.ep
            yield target, Reason("mask-form", f"{name_of(target)} has no exact form of the mask {meaning.kind} on {ep}")


def _appending(exact: Sequence[Lowering], spec: AttentionSpec, plan_context: PlanContext) -> list[Lowering]:
    """The ways that append to the cache, and for prompts of a known length those that are much faster although they do not."""
    cached = [item for item in exact if item.encoding.cached]
    params = params_of(spec, cached[0].encoding, cached[0].target).with_lengths(plan_context.lengths)
    if not isinstance(params.rows, int) or params.rows == 1:
        return cached
    most = min(item.time for item in cached) * _WORTHWHILE_SHARE_OF_TIME
    return [item for item in exact if item.encoding.cached or item.time <= most]


def _lowerings(
    takers: Sequence[Target], spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext
) -> tuple[list[Lowering], dict[str, Reason]]:
    """Every lowering that kernels take, and, by target, why one is not trusted."""
    found, wrong, device = list[Lowering](), dict[str, Reason](), plan_context.device
    for target in takers:
        for encoding in target.encodings(spec, meaning):
            if encoding.band is not None and plan_context.provable:
                continue
            params = params_of(spec, encoding, target)
            reason = why_wrong(params, plan_context)
            if reason is None and plan_context.conformance is not None:
                reason = plan_context.conformance.failure(Form.of(params, cached=encoding.cached))
            if reason is not None:
                wrong.setdefault(name_of(target), reason)
            elif _is_taken(encoding, target, device):
                found.append(Lowering(target, encoding, forecast(params.with_lengths(plan_context.lengths), device)))
    return found, wrong


def _is_taken(encoding: MaskEncoding, target: Target, device: Device) -> bool:
    """Whether kernels of a target on a device take an encoding of a mask."""
    found = support(name_of(target), device.provider)
    if isinstance(found, Reason) or (encoding.band is not None and found.blocks_time is None):
        return False
    return encoding.mask in found.masks and (found.causal or not encoding.causal)


def why_wrong(params: AttentionParams, plan_context: PlanContext) -> Reason | None:
    """Why an operator is not trusted with an attention on a device, or None."""
    found = support(params.op, plan_context.device.provider)
    if isinstance(found, Reason):
        return None
    reason = None if found.is_wrong is None else found.is_wrong(params)
    name = None if found.assumes is None else found.assumes(params)
    if reason is not None or name is None or name in plan_context.taken.names:
        return reason
    message = f"{params.op} is right on {plan_context.device.ep} only if {ASSUMPTIONS[name]}, which is not assumed"
    return Reason("wrong-on-device", message)


def _vouched(target: Target, some: Sequence[Lowering], spec: AttentionSpec, plan_context: PlanContext) -> Lowering | None:
    """The fastest way of a target for the batches that the caller vouches for."""
    for item in some:
        assumed = item.encoding.when in plan_context.assumed and (
            plan_context.padding == "assume-none" or not item.encoding.single
        )
        if item.target is target and assumed and _is_safe(params_of(spec, item.encoding, target), plan_context.device):
            return item
    return None


def _gains(
    plan: Plan, takers: Sequence[Target], spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext
) -> Iterator[Speedup]:
    """Changes that would make it much faster, each by itself."""
    half = dataclasses.replace(spec, dtype=ir.DataType.FLOAT16)
    changed = (
        [("in float16", half, plan_context)]
        if spec.dtype == ir.DataType.FLOAT and plan_context.device.provider.rounds_float16
        else []
    )
    policies: tuple[PaddingPolicy, ...] = ("guarded", "assume-right")
    changed += [(f"with --padding {padding}", spec, dataclasses.replace(plan_context, padding=padding)) for padding in policies]
    for change, other, under in changed:
        plans = [found for _, found in _plans(takers, other, meaning, under) if isinstance(found, Plan)]
        best = min((found.best for found in plans), key=lambda item: item.time, default=plan.best)
        if best.time < plan.best.time * _WORTHWHILE_SHARE_OF_TIME:
            yield Speedup(change, best.forecast.kernel, round(plan.best.time / best.time, 1))


def params_of(spec: AttentionSpec, encoding: MaskEncoding, target: Target) -> AttentionParams:
    """Parameters of an attention for the forecast of its kernel, with the mask encoded as `encoding`."""
    axes = spec.axes
    assert spec.dtype is not None
    return AttentionParams(
        dtype=spec.dtype,
        batch=length(axes.b),
        heads=axes.num_heads,
        rows=length(axes.i),
        columns=length(axes.j),
        head_size=length(axes.h),
        v_head_size=length(axes.v),
        mask=encoding.mask,
        causal=encoding.causal,
        windowed=encoding.windowed,
        cached=spec.cache is not None and (encoding.cached or spec.sink is None),  # a sink's own key goes after the new ones
        grouped=length(shared_heads(spec)) != length(axes.n),
        capped=spec.softcap is not None or spec.sink is not None,
        op=name_of(target),
        band=encoding.band,
    )


def _plan(main: Lowering, some: Sequence[Lowering], spec: AttentionSpec, plan_context: PlanContext) -> Plan | Reason:
    """The plan around an exact lowering, with faster ones under tests; or the reason why the site is better left alone."""
    assumed = plan_context.assumed
    for item in some:
        single = item.encoding.single and plan_context.padding != "assume-none"
        if item.encoding.when not in assumed or single or (item.time >= main.time and plan_context.target == "auto"):
            continue
        if _is_safe(params_of(spec, item.encoding, item.target), plan_context.device):
            return Plan(item)
    if main.forecast.fails is not None and not (some and plan_context.may_test):
        return main.forecast.fails
    tested = _tested(main, some, spec, plan_context)
    best = min([main, *tested], key=lambda item: item.time)
    asked = plan_context.always or plan_context.target != "auto" or plan_context.kernels is not None
    slower = None if asked else _slower(spec, best, plan_context)
    if slower is not None:
        return slower
    if plan_context.may_test and plan_context.target != "auto" and name_of(main.target) != plan_context.target:
        return Plan(main, tuple(some[:1]))
    chosen = _selection(tested, main)
    return Plan(main, chosen if spec.cache is None else chosen[:1])


def _slower(spec: AttentionSpec, best: Lowering, plan_context: PlanContext) -> Reason | None:
    """Why an attention is better left decomposed, at sizes that are known."""
    params = params_of(spec, best.encoding, best.target).with_lengths(plan_context.lengths)
    known = isinstance(params.scores, int) and _UNFUSED_FROM <= params.scores < _UNFUSED_TO
    unfused = unfused_time(params, plan_context.device, guarded=bool(spec.row_rules))
    if not known or len(spec.nodes) == 1 or best.time <= unfused * _MEASUREMENT_NOISE:
        return None
    times = f"{best.time / unfused:.1f} times as fast as {best.forecast.kernel} at {params.scores} scores"
    return Reason("unfused-faster", f"the unfused form was measured to be {times}; --always fuses anyway")


def _is_safe(params: AttentionParams, device: Device) -> bool:
    """Whether no size makes the attention's kernels fail, not even one that the caller does not expect."""
    return forecast(params, device).never_fails


def _selection(some: Sequence[Lowering], main: Lowering) -> tuple[Lowering, ...]:
    """Ever slower ways for ever more batches, each much faster than the last."""
    chosen: list[Lowering] = []
    for item in some:
        covered = any(other.encoding.covers(item.encoding) for other in chosen)
        if item.time <= main.time * _WORTHWHILE_SHARE_OF_TIME and not covered:
            chosen.append(item)
    return tuple(chosen)


def _tested(main: Lowering, some: Sequence[Lowering], spec: AttentionSpec, plan_context: PlanContext) -> Sequence[Lowering]:
    """The faster ways that may run under tests.

    All of them where that is asked for, and where `main` fails or takes more memory than a test; else those of which the caller
    vouches for the batches, so that sizes alone are tested.
    """
    if not plan_context.may_test:
        return ()
    scores = params_of(spec, main.encoding, main.target).with_lengths(plan_context.lengths).scores
    is_huge = spec.cache is None and isinstance(scores, int) and scores >= GUARDED_FROM
    if plan_context.padding == "guarded" or is_huge or main.forecast.fails is not None:
        return some
    return [item for item in some if item.encoding.when in plan_context.assumed and not item.encoding.single]
