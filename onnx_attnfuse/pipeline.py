"""The steps from a model to a fused model and its report, in order: find, read, understand, plan, build, judge, commit."""

from __future__ import annotations

import dataclasses
import time

import onnx_ir as ir

from onnx_attnfuse.axes.factors import leaves, length
from onnx_attnfuse.building import Building, Built
from onnx_attnfuse.court import Court
from onnx_attnfuse.devices import resolve
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.heal import widen_caches
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.meaning import understand
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.match.finder import Candidate, anchor_of, find_candidates, read_candidate
from onnx_attnfuse.match.registry import load_packs
from onnx_attnfuse.options import Options
from onnx_attnfuse.plan import Policy, make_plans
from onnx_attnfuse.reasons import Reason, Refused, defect
from onnx_attnfuse.report.kernel import kernel_of
from onnx_attnfuse.report.model import Report, SiteReport, Status
from onnx_attnfuse.rewrite import check_shape_users, commit, tidy
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import qualified
from onnx_attnfuse.targets.emitted import Workbench

_CONTRIB = "com.microsoft"


class Run:
    """One pass over one model."""

    def __init__(self, model: ir.Model, options: Options, court: Court) -> None:
        self.model = model
        self.options = options
        self.court = court
        self.policy = Policy(resolve(options.ep, options.arch), options.padding, options.dim, options.always, options.target)
        self.names = all_names(model)
        self.sites: list[SiteReport] = []
        self.replaced: set[ir.Value] = set()

    def go(self) -> Report:
        """Fuses what can be fused, in place."""
        load_packs()
        start = time.perf_counter()
        before = count_ops(self.model)
        work = [(scope, find_candidates(scope, self.options.keep_outputs)) for scope in scopes(self.model)]
        widened = 0
        total, done = sum(len(candidates) for _, candidates in work), 0
        for scope, candidates in work:
            builder = Builder(scope.graph, scope.facts, scope.opset, self.names)
            bench = Workbench(builder, Bounds(scope.facts), Reader(scope.facts), self.policy.device)
            guards = Guards(builder)
            for candidate in candidates:
                self.options.progress("fusing", done, total)
                self.sites.append(_as_asked(self._site(candidate, scope, bench, guards), self.policy.target))
                done += 1
            fold(builder.rearranged, builder, "attnfuse/weight")
            guards.spare()
            widened += widen_caches(builder)
        if any(site.status == "fused" for site in self.sites):
            self._import_contrib()
        seconds = time.perf_counter() - start
        notes = [f"{widened} RotaryEmbedding given caches for the whole batch, which ONNX Runtime wants"] if widened else []
        return Report(tuple(self.sites), seconds, before, count_ops(self.model), tuple(notes), self.court.differing)

    def _site(self, candidate: Candidate, scope: Scope, bench: Workbench, guards: Guards) -> SiteReport:
        if candidate.spec is not None and not self.replaced.isdisjoint(candidate.spec.values()):
            candidate = read_candidate(candidate.node, candidate.softmax, scope, self.options.keep_outputs)
        found = _unfused(candidate, scope)
        spec = candidate.spec
        if spec is None:
            return found
        builder = bench.builder
        builder.at(anchor_of(spec))
        try:
            meaning = self.court.trusted(spec, understand(spec, bench.reader), scope, self.model)
            found = dataclasses.replace(found, mask=meaning.kind, mask_text=meaning.text or None)
            reasons: list[Reason] = []
            plans, refusals = make_plans(spec, meaning, self.policy, bench)
            for plan in plans:
                if (found.op, found.domain) == (plan.main.target.OP, plan.main.target.DOMAIN):
                    kept = _kept(found, self.policy.target)
                    return dataclasses.replace(
                        found, kernel=kernel_of(plan, self.policy.device), reasons=tuple(reasons or refusals or [kept])
                    )
                try:
                    check_shape_users(spec, builder)
                    built = Building(spec, meaning, plan, scope, self.model, bench, self.court, guards).build()
                except Refused as refused:
                    tidy(builder)
                    reasons.append(refused.reason)
                else:
                    return self._fused(found, spec, built, builder)
            reasons = reasons or refusals
        except Refused as refused:
            reasons = [refused.reason]
        except Exception as error:  # noqa: BLE001 - the site is reported and undone, the others go on
            reasons = [defect(error, found.name)]
        tidy(builder)
        return dataclasses.replace(found, reasons=tuple(reasons))

    def _fused(self, found: SiteReport, spec: AttentionSpec, built: Built, builder: Builder) -> SiteReport:
        """Connects what was built, and tells."""
        commit(spec, built.emitted, builder)
        tidy(builder)
        self.replaced.add(built.emitted.replaced)
        return dataclasses.replace(
            found,
            status="fused",
            op=built.plan.main.target.OP,
            domain=built.plan.main.target.DOMAIN,
            scale=None if spec.scale_values else built.emitted.scale,
            mask_form=built.emitted.mask,
            kernel=kernel_of(built.plan, self.policy.device),
            layout=built.emitted.layouts,
            verified=built.verified,
            reasons=built.reasons,
        )

    def _import_contrib(self) -> None:
        if any(node.domain == _CONTRIB for node in self.model.graph.all_nodes()):
            self.model.opset_imports.setdefault(_CONTRIB, 1)
        for function in self.model.functions.values():
            if any(node.domain == _CONTRIB for node in function.all_nodes()):
                function.opset_imports.setdefault(_CONTRIB, 1)


def _kept(found: SiteReport, asked: str) -> Reason:
    """Why an operator stays that a plan would have put in its own place."""
    if asked != "auto":
        return Reason("as-asked", f"{found.op} is what was asked for, and stays")
    return Reason("fastest", f"{found.op} is the faster operator here, and stays")


def _as_asked(site: SiteReport, asked: str) -> SiteReport:
    """The report on a site that is done; an operator of the standard that stays where another is asked for is not."""
    name = qualified(site.op or "", site.domain or "")
    if asked in {"auto", name} or site.status != "already-fused" or site.domain == _CONTRIB:
        return site
    reason = Reason("not-as-asked", f"it stays {name}, and {asked} was asked for")
    return dataclasses.replace(site, status="skipped", reasons=(*site.reasons, reason))


def _unfused(candidate: Candidate, scope: Scope) -> SiteReport:
    """The report on a site as it is before anything is done."""
    node, spec, refusal = candidate.node, candidate.spec, candidate.refusal
    found = SiteReport(node.name or node.outputs[0].name or "", scope.path, "skipped")
    if candidate.softmax is None:
        heads = attribute(node, "num_heads", attribute(node, "q_num_heads"))
        kv_heads = attribute(node, "kv_num_heads", heads)
        status: Status = "already-fused"
        found = dataclasses.replace(
            found, status=status, op=node.op_type, domain=node.domain, num_heads=heads, kv_num_heads=kv_heads
        )
    if refusal is not None:
        status = "not-attention" if refusal.code == "not-attention" else found.status
        return dataclasses.replace(found, status=status, reasons=(refusal,))
    if spec is None:
        return found
    axes = spec.axes
    present = {leaf for axis in spec.key[-1].laid.axes for leaf in leaves(axis)}
    kv_axis = tuple(leaf for leaf in axes.n if leaf in present)
    sizes = [length(axis) for axis in (axes.n, kv_axis, axes.h, axes.v)]
    known = [size if isinstance(size, int) else None for size in sizes]
    return dataclasses.replace(found, num_heads=known[0], kv_num_heads=known[1], head_size=known[2], v_head_size=known[3])
