"""Choosing the operator for one attention, and the ways to hand its mask over; every refusal is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import onnx_ir as ir

from onnx_attnfuse.axes.factors import length
from onnx_attnfuse.conditions import MaskForm, Problem
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.devices import Device
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels import MOST_SCORES, Forecast, Gain, forecast, unfused_time
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.options import PaddingPolicy, TargetName
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import TARGETS, Target, name_of, packed
from onnx_attnfuse.targets.emitted import Way, When, Workbench
from onnx_attnfuse.targets.layout import shared_heads

_NOISE = 1.1
_UNFUSED_FROM, _UNFUSED_TO = 1 << 26, MOST_SCORES
"""Between these numbers of scores, b·n·s·t, what is spelled out may be faster; beyond, its memory is what counts."""
_WORTHWHILE = 0.85
"""Another way is taken if it needs at most this part of the time."""
FASTER_FROM: Mapping[MaskForm, int] = {"lengths": 1 << 23, "ranges": 1 << 21, "none": 0}
"""From this many scores on, b·n·s·t, a way is faster than a bias."""
GUARDED_FROM, GUARDED_KEYS_FROM = 1 << 25, 1 << 11
"""From this many scores on, b·n·s·t, a faster way outweighs its test (decision 0006); with a cache, from this
many keys on."""
_VOUCHED: Mapping[PaddingPolicy, frozenset[When]] = {
    "assume-right": frozenset(["right_padded"]),
    "assume-none": frozenset(["always", "right_padded", "unpadded"]),
}
"""The batches that a caller vouches for."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """An operator and a way to hand it the mask, and what will run."""

    target: Target
    way: Way
    forecast: Forecast

    @property
    def time(self) -> float:
        """How long it takes."""
        return self.forecast.time


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will compute an attention."""

    main: Planned
    """Exact for every batch, or for those that the caller vouches for."""
    faster: tuple[Planned, ...] = ()
    """Exact for some batches, which a test at run time tells; the fastest first."""
    gains: tuple[Gain, ...] = ()

    @property
    def best(self) -> Planned:
        """The fastest way of all."""
        return self.faster[0] if self.faster else self.main


@dataclasses.dataclass(frozen=True)
class Planning:
    """What a plan is made for.

    Raises:
        OptionError: A choice does not exist, or a length is none.
    """

    device: Device
    padding: PaddingPolicy = "auto"
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Numbers that symbolic sizes will have; they decide what is fast, never what is exact."""
    always: bool = False
    """Fuse also where what is spelled out is faster."""
    target: TargetName = "auto"
    """The only operator to use, whatever is faster; `auto`: the fastest."""
    kernels: frozenset[str] | None = None
    """The only kernels that may be forecast; None: any."""
    dtype: ir.DataType | None = None
    """Plan as if attention was computed in this type; what is built is of its own type all the same, and serves nobody."""

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
    def vouched(self) -> frozenset[When]:
        """The batches that the caller vouches for."""
        return _VOUCHED.get(self.padding, frozenset())


def make_plans(spec: AttentionSpec, meaning: Meaning, planning: Planning, bench: Workbench) -> tuple[list[Plan], list[Reason]]:
    """A plan for each target that takes `spec`, the fastest first, and why the others do not.

    Where one target is asked for, others serve for the batches that it does not take, and only then.
    """
    asked = [target for target in TARGETS if _is_asked(target, planning)]
    refused = {name_of(target): _refusal(target, spec, meaning, bench) for target in asked}
    takers = [target for target in asked if refused[name_of(target)] is None]
    partly = takers and planning.target != "auto" and not any(way.is_exact for way in takers[0].ways(spec, meaning))
    if partly and planning.padding != "exact":
        others = [target for target in TARGETS if target not in takers and planning.device.ep in target.PROVIDERS]
        takers += [target for target in others if _refusal(target, spec, meaning, bench) is None]
    plans: list[Plan] = []
    for target, plan in _plans(takers, spec, meaning, planning):
        if isinstance(plan, Reason):
            refused[name_of(target)] = plan
        else:
            plans.append(dataclasses.replace(plan, gains=tuple(_gains(plan, takers, spec, meaning, planning))))
    plans.sort(key=lambda plan: (plan.best.time, plan.main.time))
    return plans, [reason for reason in refused.values() if reason is not None]


def _refusal(target: Target, spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Reason | None:
    """Why a target does not take `spec`; one that fails at the question does not, and the others are asked all the same."""
    with contained(Subject(f"asking {name_of(target)}"), spec.name) as attempt:
        return target.refuse(spec, meaning, bench)
    return attempt.reason


def _is_asked(target: Target, planning: Planning) -> bool:
    return planning.device.ep in target.PROVIDERS if planning.target == "auto" else name_of(target) == planning.target


def _plans(
    takers: Sequence[Target], spec: AttentionSpec, meaning: Meaning, planning: Planning
) -> Iterator[tuple[Target, Plan | Reason]]:
    """A plan for each target that has a way for every batch, with the faster ways of all; why not, if it alone is asked for."""
    found = [_planned(spec, way, target, planning) for target in takers for way in target.ways(spec, meaning)]
    if planning.kernels is not None:
        found = [item for item in found if item.forecast.kernel in planning.kernels]
    some = [item for item in found if not item.way.is_exact and not math.isinf(item.time)]
    if planning.target != "auto":
        some = [item for item in some if name_of(item.target) == planning.target]
    some.sort(key=lambda item: item.time)
    exact = [item for item in found if item.way.is_exact]
    if planning.target == "auto" and any(item.way.cached for item in exact):
        exact = [item for item in exact if item.way.cached]
    for target in takers:
        always = [item for item in exact if item.target is target]
        if always:
            together = [item for item in some if item.target is target or not (target.ALONE or item.target.ALONE)]
            yield target, _plan(min(always, key=lambda item: item.time), together, spec, planning)
        elif planning.kernels is not None and (vouched := _vouched(target, some, spec, planning)) is not None:
            yield target, Plan(vouched)
        elif planning.target == name_of(target) and len(takers) == 1:
            yield target, Reason("not-every-batch", f"{planning.target} is exact for some batches only, and a test is not wanted")


def _vouched(target: Target, some: Sequence[Planned], spec: AttentionSpec, planning: Planning) -> Planned | None:
    """The fastest way of a target for the batches that the caller vouches for."""
    for item in some:
        vouched = item.way.when in planning.vouched and (planning.padding == "assume-none" or not item.way.single)
        if item.target is target and vouched and _is_safe(problem_of(spec, item.way, target), planning.device):
            return item
    return None


def _gains(plan: Plan, takers: Sequence[Target], spec: AttentionSpec, meaning: Meaning, planning: Planning) -> Iterator[Gain]:
    """Changes that would make it much faster, each by itself."""
    half = dataclasses.replace(spec, dtype=ir.DataType.FLOAT16)
    changed = [("in float16", half, planning)] if spec.dtype == ir.DataType.FLOAT and planning.device.ep == "cuda" else []
    changed.append(("with --padding assume-right", spec, dataclasses.replace(planning, padding="assume-right")))
    for change, other, under in changed:
        plans = [found for _, found in _plans(takers, other, meaning, under) if isinstance(found, Plan)]
        best = min((found.best for found in plans), key=lambda item: item.time, default=plan.best)
        if best.time < plan.best.time * _WORTHWHILE:
            yield Gain(change, best.forecast.kernel, round(plan.best.time / best.time, 1))


def problem_of(spec: AttentionSpec, way: Way, target: Target) -> Problem:
    """What a kernel is asked to do if the mask is handed over this way."""
    axes = spec.axes
    assert spec.dtype is not None
    return Problem(
        dtype=spec.dtype,
        batch=length(axes.b),
        heads=axes.num_heads,
        rows=length(axes.i),
        columns=length(axes.j),
        head_size=length(axes.h),
        v_head_size=length(axes.v),
        mask=way.mask,
        causal=way.causal,
        windowed=way.windowed,
        cached=spec.cache is not None,
        grouped=length(shared_heads(spec)) != length(axes.n),
        capped=spec.softcap is not None or spec.sink is not None,
        op=name_of(target),
    )


def _plan(main: Planned, some: Sequence[Planned], spec: AttentionSpec, planning: Planning) -> Plan | Reason:
    """What is built around a way for every batch, or why it is better left alone."""
    vouched = planning.vouched
    for item in some:
        single = item.way.single and planning.padding != "assume-none"
        if item.way.when not in vouched or single or (item.time >= main.time and planning.target == "auto"):
            continue
        if _is_safe(problem_of(spec, item.way, item.target), planning.device):
            return Plan(item)
    if main.forecast.fails is not None and (not some or planning.padding == "exact"):
        return main.forecast.fails
    best = min([main, *some], key=lambda item: item.time)
    asked = planning.always or planning.target != "auto" or planning.kernels is not None
    slower = None if asked else _slower(spec, best, planning)
    if slower is not None:
        return slower
    if planning.padding == "exact":
        return Plan(main)
    if planning.target != "auto" and name_of(main.target) != planning.target:
        return Plan(main, tuple(some[:1]))
    guarded = (spec.cache is not None and not main.way.cached) or _is_large(problem_of(spec, main.way, main.target), planning)
    chosen = _selection(some, main) if guarded else ()
    return Plan(main, chosen if spec.cache is None else chosen[:1])


def _planned(spec: AttentionSpec, way: Way, target: Target, planning: Planning) -> Planned:
    return Planned(target, way, forecast(problem_of(spec, way, target).settled(planning.lengths), planning.device))


def _slower(spec: AttentionSpec, best: Planned, planning: Planning) -> Reason | None:
    """Why it is better left spelled out, at sizes that are known."""
    problem = problem_of(spec, best.way, best.target).settled(planning.lengths)
    known = isinstance(problem.scores, int) and _UNFUSED_FROM <= problem.scores < _UNFUSED_TO
    unfused = unfused_time(problem, planning.device, guarded=bool(spec.row_rules))
    if not known or len(spec.nodes) == 1 or best.time <= unfused * _NOISE:
        return None
    times = f"{best.time / unfused:.1f} times as fast as {best.forecast.kernel} at {problem.scores} scores"
    return Reason("unfused-faster", f"spelled out it was measured to be {times}; --always fuses it")


def _is_safe(problem: Problem, device: Device) -> bool:
    """Whether no size makes it fail, those that the caller does not expect included."""
    return forecast(problem, device).never_fails


def _selection(some: Sequence[Planned], main: Planned) -> tuple[Planned, ...]:
    """Ever slower ways for ever more batches, each much faster than the last."""
    chosen: list[Planned] = []
    for item in some:
        covered = any(other.way.covers(item.way) for other in chosen)
        if item.time <= main.time * _WORTHWHILE and not covered:
            chosen.append(item)
    return tuple(chosen)


def _is_large(problem: Problem, planning: Planning) -> bool:
    """Whether a faster way outweighs its test: with a cache for all prompts, and for one position on top of many."""
    settled = problem.settled(planning.lengths)
    if planning.padding == "guarded" or (problem.cached and settled.rows != 1):
        return True
    size, least = (settled.columns, GUARDED_KEYS_FROM) if problem.cached else (settled.scores, GUARDED_FROM)
    return not isinstance(size, int) or size >= least
