"""One attention at a time: understood, planned, built, judged, connected; or left as it is, with the reason."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.building import Building, Built
from onnx_attnfuse.conditions import Problem
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.court import Court
from onnx_attnfuse.graph.order import Order
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.kernels import forecast_standing
from onnx_attnfuse.language.readers import Readers
from onnx_attnfuse.masks.assumed import assumed_by
from onnx_attnfuse.masks.meaning import understand
from onnx_attnfuse.match.finder import Candidate, anchor_of, read_candidate
from onnx_attnfuse.operators import problem_of_node
from onnx_attnfuse.options import Options
from onnx_attnfuse.plan import Plan, Planning
from onnx_attnfuse.policy import Policy
from onnx_attnfuse.preference import preferred_plans
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.album import Album
from onnx_attnfuse.report.kernel import kernel_of, kernel_of_forecast
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.report.site import kept, unfused
from onnx_attnfuse.rewrite import check_apart, check_lengths, check_shape_users, commit, tidy
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets.emitted import Workbench
from onnx_attnfuse.targets.layout import replaces_rotation

_FUSING = Subject("fusing an attention")


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What a site is to become."""

    found: SiteReport
    reasons: tuple[Reason, ...]
    built: Built | None = None
    """New nodes beside the old ones; None: it stays as it is."""


@dataclasses.dataclass
class Sites:
    """The attentions of one graph."""

    scope: Scope
    model: ir.Model
    bench: Workbench
    court: Court
    guards: Guards
    options: Options
    readers: Readers
    policy: Policy
    """Which kernels are wanted."""
    album: Album
    order: Order
    replaced: dict[ir.Value, ir.Value]
    """Results that were replaced, and what by: those of outer graphs too, which nested ones read."""
    unsorted: bool = False
    """Whether earlier nodes may read what later ones give."""

    def fuse(self, candidate: Candidate, planning: Planning) -> SiteReport:
        """Fuses one, or says why not; a defect of ours costs this site only, unless it is met while the graph changes."""
        if candidate.spec is not None and not self.replaced.keys().isdisjoint(candidate.spec.values()):
            candidate = read_candidate(candidate.node, candidate.softmax, self.scope, self.readers, self.options.keep_outputs)
        found, spec = SiteReport(label(candidate.node), self.scope.path, "skipped"), candidate.spec
        answer: _Answer | None = None
        with contained(_FUSING, found.name, lambda: tidy(self.bench.builder)) as attempt:
            found = unfused(candidate, self.scope)
            if spec is None:
                return self._standing(found, candidate.node, planning)
            self.bench.builder.at(anchor_of(spec))
            answer = self._planned(candidate.node, spec, found, planning)
        if answer is None or spec is None:
            assert attempt.reason is not None
            return dataclasses.replace(found, reasons=(attempt.reason,))
        found = dataclasses.replace(answer.found, reasons=answer.reasons)
        if answer.built is not None:
            found = self._fused(found, spec, answer.built, planning)
            self.album.after(candidate.node, spec, answer.built.emitted, self.scope)
        tidy(self.bench.builder)
        return found

    def _standing(self, found: SiteReport, node: ir.Node, planning: Planning) -> SiteReport:
        """The report on what cannot be read; with its kernel if it is an operator of ONNX Runtime."""
        problem = problem_of_node(node, self.scope.facts) if found.status == "already-fused" else None
        if not isinstance(problem, Problem):
            return found
        problem = dataclasses.replace(problem, dtype=planning.dtype or problem.dtype).settled(planning.lengths)
        foreseen = forecast_standing(problem, planning.device)
        return found if foreseen is None else dataclasses.replace(found, kernel=kernel_of_forecast(foreseen, planning.device))

    def _planned(self, node: ir.Node, spec: AttentionSpec, found: SiteReport, planning: Planning) -> _Answer:
        """Builds what the first plan asks for that can be carried out, and says what kept it from being another one.

        Raises:
            Refused: The mask cannot be looked at, or nothing is computed.
        """
        check_lengths(spec)
        check_apart(spec, self.order)
        meaning = self.court.trusted(spec, understand(spec, self.bench.reader), self.scope, self.model)
        assumptions = assumed_by(spec, meaning, self.scope.facts)
        found = dataclasses.replace(found, mask=meaning.kind, mask_text=meaning.text or None, assumptions=assumptions)
        self.album.mask(node, spec, meaning, self.scope)
        foreseen = spec if planning.dtype is None else dataclasses.replace(spec, dtype=planning.dtype)
        plans, refusals = preferred_plans(foreseen, meaning, planning, self.policy, self.bench)
        reasons: list[Reason] = []
        for plan in plans:
            if _is_in_place(found, plan, spec):
                why = refusals if len(plans) == 1 and refusals else [kept(found, planning.target)]
                return _Answer(dataclasses.replace(found, kernel=kernel_of(plan, planning.device)), tuple(reasons or why))
            target = Subject(f"fusing into {plan.main.target.OP}")
            with contained(target, found.name, lambda: tidy(self.bench.builder)) as attempt:
                cached = any(item.way.cached for item in (plan.main, *plan.faster))
                check_shape_users(spec, self.bench.builder, cached=cached)
                built = Building(spec, meaning, plan, self.scope, self.model, self.bench, self.court, self.guards).build()
                self.order.add(self.bench.builder.added, anchor_of(spec))
                return _Answer(found, built.reasons, built)
            reasons += [] if attempt.reason is None else [attempt.reason]
        return _Answer(found, tuple(reasons or refusals))

    def _fused(self, found: SiteReport, spec: AttentionSpec, built: Built, planning: Planning) -> SiteReport:
        """Connects what was built, and tells."""
        commit(spec, built.emitted, self.bench.builder, self.order)
        self.replaced.update(built.emitted.results)
        self.unsorted |= bool(built.emitted.presents)
        return dataclasses.replace(
            found,
            status="fused",
            op=built.plan.main.target.OP,
            domain=built.plan.main.target.DOMAIN,
            scale=None if spec.scale_values else built.emitted.scale,
            mask_form=built.emitted.mask,
            kernel=kernel_of(built.plan, planning.device),
            layout=built.emitted.layouts,
            verified=built.verified,
        )


def _is_in_place(found: SiteReport, plan: Plan, spec: AttentionSpec) -> bool:
    """Whether what the plan would build stands there already."""
    same = (found.op, found.domain) == (plan.main.target.OP, plan.main.target.DOMAIN)
    return same and not plan.faster and not plan.main.way.cached and not replaces_rotation(spec)
