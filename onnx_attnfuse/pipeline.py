"""The steps from a model to a fused model and its report, in order: find, read, understand, plan, build, judge, commit."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.axes.factors import leaves, length
from onnx_attnfuse.building import Building, Built
from onnx_attnfuse.court import Court
from onnx_attnfuse.devices import resolve
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.heal import widen_caches
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.meaning import Meaning, understand
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.match.finder import Candidate, anchor_of, find_candidates, read_candidate
from onnx_attnfuse.match.registry import load_packs
from onnx_attnfuse.options import Options
from onnx_attnfuse.packing.step import Packing
from onnx_attnfuse.packing.told import note, told
from onnx_attnfuse.plan import Plan, Policy, make_plans
from onnx_attnfuse.reasons import Reason, Refused, defect
from onnx_attnfuse.report.kernel import kernel_of
from onnx_attnfuse.report.model import Report, SiteReport, Status
from onnx_attnfuse.rewrite import check_shape_users, commit, tidy
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import packed, qualified
from onnx_attnfuse.targets.emitted import Workbench
from onnx_attnfuse.unblock import unblock

_CONTRIB = "com.microsoft"


class Run:
    """One pass over one model."""

    def __init__(self, model: ir.Model, options: Options, court: Court) -> None:
        self.model = model
        self.options = options
        self.court = court
        self.policy = Policy(resolve(options.ep, options.arch), options.padding, options.dim, options.always, options.target)
        self.names = all_names(model)
        self.opset = Opset(model, asked=options.target == "onnx.Attention")
        self.sites: list[SiteReport] = []
        self.replaced: dict[ir.Value, ir.Value] = {}
        """Results that were replaced, and what by."""
        self.notes: list[str] = []
        self.unsorted = False
        """Whether earlier nodes may read what later ones give."""

    def go(self) -> Report:
        """Fuses what can be fused, in place."""
        load_packs()
        start = time.perf_counter()
        before = count_ops(self.model)
        work = [(scope, find_candidates(scope, self.options.keep_outputs)) for scope in scopes(self.model)]
        widened, unblocked = 0, Counter[str]()
        total, done = sum(len(candidates) for _, candidates in work), 0
        for scope, candidates in work:
            builder = Builder(scope.graph, scope.facts, max(scope.opset, self.opset.version), self.names)
            bench = Workbench(builder, Bounds(scope.facts), Reader(scope.facts), self.policy.device, self.opset)
            guards = Guards(builder)
            if self.policy.target == packed.NAME:
                self.options.progress("packing", done, total)
                self.sites += self._packed(candidates, scope, bench, guards)
            for candidate in candidates if self.policy.target != packed.NAME else ():
                self.options.progress("fusing", done, total)
                self.sites.append(_as_asked(self._site(candidate, scope, bench, guards, self.policy), self.policy.target))
                done += 1
            if self.unsorted:
                scope.graph.sort()
                self.unsorted = False
            guards.spare()
            widened += widen_caches(builder)
            if candidates:
                unblocked += unblock(scope, self.model, builder, self.court)
        if any(site.status == "fused" for site in self.sites):
            self._import_contrib()
        if not any(node.op_type == "Attention" and node.domain == "" for node in self.model.graph.all_nodes()):
            self.opset.restore()
        seconds = time.perf_counter() - start
        notes = list(self.notes)
        notes += [f"{widened} RotaryEmbedding given caches for the whole batch, which ONNX Runtime wants"] if widened else []
        if self.opset.raised_from is not None:
            notes.append(f"opset raised from {self.opset.raised_from} to {self.opset.version}, which ai.onnx Attention needs")
        notes += [f"{count} {what}" for what, count in unblocked.items()]
        return Report(tuple(self.sites), seconds, before, count_ops(self.model), tuple(notes), self.court.differing)

    def _packed(self, candidates: Sequence[Candidate], scope: Scope, bench: Workbench, guards: Guards) -> list[SiteReport]:
        """Packs what can be packed of one graph; where that is behind a test, the usual forms stand beside it."""
        packing = Packing(scope, self.model, bench, self.court, self.policy)
        found = [_unfused(candidate, scope) for candidate in candidates]
        wanted: dict[int, tuple[AttentionSpec, Meaning]] = {}
        for place, candidate in enumerate(candidates):
            if candidate.spec is not None:
                bench.builder.at(anchor_of(candidate.spec))
                meaning = self.court.trusted(candidate.spec, understand(candidate.spec, bench.reader), scope, self.model)
                found[place] = dataclasses.replace(found[place], mask=meaning.kind, mask_text=meaning.text or None)
                wanted[place] = candidate.spec, meaning
        places = {id(spec): place for place, (spec, _) in wanted.items()}
        usual = dataclasses.replace(self.policy, target="auto", padding="exact")
        for woven in packing.weave(list(wanted.values()), [item.node for item in candidates]):
            others: dict[int, SiteReport] = {}
            self.notes.append(note(woven.region, vouched=packing.is_vouched))
            if packing.is_vouched:
                packing.connect(woven)
            else:
                for place in [places[id(site.spec)] for site in woven.region.sites]:
                    others[place] = self._site(candidates[place], scope, bench, guards, usual)
                packing.fork(woven, guards, self.replaced)
            for site in woven.region.sites:
                place = places[id(site.spec)]
                found[place] = told(found[place], woven, site, self.policy, others.get(place))
            self.unsorted = True
        for place, (spec, _) in wanted.items():
            reason = packing.reasons.get(id(spec))
            if reason is not None:
                found[place] = dataclasses.replace(found[place], reasons=(reason,))
        return [_as_asked(site, self.policy.target) for site in found]

    def _site(self, candidate: Candidate, scope: Scope, bench: Workbench, guards: Guards, policy: Policy) -> SiteReport:
        if candidate.spec is not None and not self.replaced.keys().isdisjoint(candidate.spec.values()):
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
            plans, refusals = make_plans(spec, meaning, policy, bench)
            for plan in plans:
                if _is_in_place(found, plan):
                    kept = refusals if len(plans) == 1 and refusals else [_kept(found, policy.target)]
                    kernel = kernel_of(plan, self.policy.device)
                    return dataclasses.replace(found, kernel=kernel, reasons=tuple(reasons or kept))
                try:
                    check_shape_users(spec, builder, cached=any(item.way.cached for item in (plan.main, *plan.faster)))
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
        self.replaced.update(built.emitted.results)
        self.unsorted |= bool(built.emitted.presents)
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


def _is_in_place(found: SiteReport, plan: Plan) -> bool:
    """Whether the operator that the plan would build stands there already."""
    same = (found.op, found.domain) == (plan.main.target.OP, plan.main.target.DOMAIN)
    return same and not plan.faster and not plan.main.way.cached


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
