"""The pipeline from a model to a fused model and its report, in order: find, read, understand, plan, build, verify, commit."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.assumptions import Assumed
from onnx_attnfuse.attention.masks.classify import understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match.candidates import Candidate, find_candidates, read_candidate
from onnx_attnfuse.attention.match.sinks import with_sink
from onnx_attnfuse.attention.match.softmax import find_softmax
from onnx_attnfuse.containment import Attempt, Failures, Subject, collecting, contained, tell
from onnx_attnfuse.fusion.enabling import AFTER, BEFORE, apply_enabling
from onnx_attnfuse.fusion.enabling.rotary_caches import widen_caches
from onnx_attnfuse.fusion.enabling.rule import EnablingRule
from onnx_attnfuse.fusion.enabling.standalone_rotary import StandaloneRotary
from onnx_attnfuse.fusion.pattern_rewrites.custom_ops import write_operators
from onnx_attnfuse.fusion.pattern_rewrites.equations import write_formulas
from onnx_attnfuse.fusion.pattern_rewrites.onnxscript_rules import apply_rules
from onnx_attnfuse.fusion.pattern_rewrites.statistics import PatternStatistics
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import PatternRewriter
from onnx_attnfuse.fusion.plan import PlanContext, make_plans
from onnx_attnfuse.fusion.plan_policy import needs_all_kernels
from onnx_attnfuse.fusion.report_site import as_asked
from onnx_attnfuse.fusion.runtime_dispatch import Guards
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import tidy
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.order import Order, is_sorted
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.graph.snapshot import Snapshot
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.describe_op import params_of_node
from onnx_attnfuse.kernels.device import Device, resolve
from onnx_attnfuse.kernels.ort_settings import session_for, switches_for
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.language.matcher.near_miss import Trace
from onnx_attnfuse.language.registry.registry import Catalogue
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.log import log_site
from onnx_attnfuse.report.model import PatternReport, Report, SiteReport
from onnx_attnfuse.report.pictures.album import Album
from onnx_attnfuse.report.pictures.model import SitePicture
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.verify.verifier import Verifier

_CONTRIB = "com.microsoft"
_ATTENDING = Subject("fusing the attentions of a graph")
_MOST_STEPS = 20_000_000
"""Nodes times attentions up to which a graph that broke is gone through again, attention by attention."""


@dataclasses.dataclass(frozen=True)
class _Work:
    """One graph and what is to be done in it."""

    scope: Scope
    rewriter: PatternRewriter
    candidates: Sequence[Candidate]
    origin: Snapshot
    """The graph before patterns changed it."""


class Run:
    """One pass over one model."""

    def __init__(
        self, model: ir.Model, options: Options, verifier: Verifier, catalogue: Catalogue, trace: Trace | None = None
    ) -> None:
        self.model = model
        self.options = options
        self.verifier = verifier
        self.timer = verifier.timer
        self.album = Album(model, options.pictures, self.timer)
        self.statistics = PatternStatistics()
        self.catalogue = dataclasses.replace(
            catalogue, readers=self.statistics.counting(catalogue.readers, catalogue.subject, verifier.doubted)
        )
        self.plan_context = PlanContext(
            resolve(options.ep, options.arch), options.padding, options.dim, options.always, options.target
        )
        self.policy = Policy.from_environment() if options.policy is None else options.policy
        self.names = all_names(model)
        self.opset = Opset(model, asked=options.target == "onnx.Attention")
        self.sites: list[SiteReport] = []
        self.notes: list[str] = []
        self.widened: list[ir.Node] = []
        self.turned = 0
        self.unblocked: Counter[str] = Counter()
        self.trace = trace
        self.replaced: dict[ir.Value, ir.Value] = {}

    def go(self) -> Report:
        """Fuses what can be fused, in place; what fails costs its own place, and is told."""
        with collecting() as failures:
            for pack in self.catalogue.broken:
                tell(pack)
            report = self._all()
        switched = failures.all()
        return dataclasses.replace(report, failures=switched, notes=(*report.notes, *map(str, switched)))

    def _all(self) -> Report:
        start = time.perf_counter()
        before = count_ops(self.model)
        with self.timer.step("find"):
            assumed = Assumed.of(self.options.assume)
            work = [self._found(scope) for scope in scopes(self.model, assumed)]
        with contained(Subject("switching kernels off")):
            self._switch([(item.scope, item.candidates) for item in work])
        total = sum(len(item.candidates) for item in work)
        pictures: list[SitePicture | None] = []
        for item in work:
            self.album.before(item.candidates, item.scope)
            with self.timer.step("plan and rewrite"):
                self._scope(item, total)
            pictures += self.album.pictures(item.candidates, len(self.sites) - len(pictures))
        self._settle_imports()
        return self._report(before, time.perf_counter() - start, pictures)

    def _report(self, before: Mapping[str, int], seconds: float, pictures: Sequence[SitePicture | None]) -> Report:
        fused = any(site.status in {"fused", "already-fused"} for site in self.sites)
        device, session = self.plan_context.device, None
        with contained(Subject("telling what was done")):
            self.notes += self._around()
            session = session_for(device if fused else Device(device.ep, device.arch))
        return Report(
            sites=tuple(self.sites),
            seconds=seconds,
            ops_before=before,
            ops_after=count_ops(self.model),
            notes=tuple(self.notes),
            differing=self.verifier.differing,
            patterns=self._patterns(),
            policy=self.policy,
            session=session,
            steps=dict(self.timer.seconds),
            pictures=tuple(pictures),
        )

    def _found(self, scope: Scope) -> _Work:
        """What patterns change in a graph, then its attentions."""
        origin = Snapshot(scope.graph)
        rewriter, fresh = self._pattern_rewrites(scope), self._pattern_rewrites(scope)
        with self.timer.step("apply patterns"), self._whole("applying patterns", scope) as attempt:
            apply_rules(rewriter)
            write_operators(rewriter)
            write_formulas(rewriter, self.trace)
        rewriter = rewriter if attempt.reason is None else fresh
        candidates: list[Candidate] = []
        with contained(Subject("looking for attention"), scope.path):
            candidates = self._candidates(scope)
        return _Work(scope, rewriter, candidates, origin)

    def _pattern_rewrites(self, scope: Scope) -> PatternRewriter:
        """What patterns will change in a graph."""
        return PatternRewriter(
            scope,
            self.model,
            self._builder(scope),
            self.catalogue,
            self.verifier,
            self.statistics,
            self.options.keep_outputs,
            kind_of=self._kind_of,
        )

    def _kind_of(self, scope: Scope, node: ir.Node) -> str | None:
        """The kind of mask of the attention at a Softmax, if it can be planned as it stands."""
        softmax = find_softmax(node, scope.facts, scope.opset)
        if softmax is None:
            return None
        found = read_candidate(node, with_sink(softmax, scope.facts), scope, self.catalogue.readers, self.options.keep_outputs)
        if found.spec is None:
            return None
        context = self._sites(scope).context
        context.builder.at(node)
        with contained(Subject("planning an attention"), label(node), lambda: tidy(context.builder)):
            meaning = understand(found.spec, context.reader)
            plans, _ = make_plans(found.spec, meaning, self.plan_context, context)
            tidy(context.builder)
            return meaning.kind if plans else None
        return None

    @staticmethod
    def _whole(what: str, scope: Scope) -> Attempt:
        """A step that changes a graph, all of it or nothing."""
        return contained(Subject(what), scope.path, Snapshot(scope.graph).restore)

    def _candidates(self, scope: Scope) -> list[Candidate]:
        """The candidates of a graph, after what is to be done before they are read."""
        with self._whole("widening caches", scope):
            self.widened += widen_caches(self._builder(scope))
        readers, keep_outputs = self.catalogue.readers, self.options.keep_outputs
        found = find_candidates(scope, readers, keep_outputs)
        return find_candidates(scope, readers, keep_outputs) if found and self._enable(BEFORE, scope) else found

    def _switch(self, work: Sequence[tuple[Scope, Sequence[Candidate]]]) -> None:
        """Plans with the kernels that the policy leaves; where operators are there that may need the others, all are left."""
        device = self.plan_context.device
        switched = dataclasses.replace(device, switches=switches_for(self.policy, device))
        existing = [(item.node, scope) for scope, items in work for item in items if item.softmax is None and item.spec is None]
        needy = [node for node, scope in existing if needs_all_kernels(params_of_node(node, scope.facts), switched)]
        if needy:
            self.notes.append(f"no kernel is switched off: operators that are there may need it, the first is '{needy[0].name}'")
            switched = dataclasses.replace(device, switches=switches_for(self.policy, device, may_switch_off=False))
        self.plan_context = dataclasses.replace(self.plan_context, device=switched)

    def _scope(self, work: _Work, total: int) -> None:
        """Fuses the attentions of one graph, then mends what stands around them."""
        scope, candidates = work.scope, work.candidates
        sites, found = self._attended(work, total)
        with contained(Subject("telling of sites")):
            for site in found:
                log_site(site)
            self.notes += work.rewriter.notes(found)
        self.sites += found
        builder = sites.context.builder
        with self._whole("replacing rotary embeddings", scope):
            standalone_rotary = StandaloneRotary(scope, self.model, builder, self.verifier)
            turned = sum(standalone_rotary.turn(candidate.spec) for candidate in candidates if candidate.spec is not None)
            if turned:
                scope.graph.sort()
            self.turned += turned
        with self._whole("folding constants", scope):
            fold(builder.rearranged, builder, "attnfuse/weight")
        with self._whole("moving what only some batches need", scope):
            sites.guards.sink_into_branches()
        if candidates:
            self._enable(AFTER, scope)
        if not is_sorted(scope.graph):
            scope.graph.sort()

    def _attended(self, work: _Work, total: int) -> tuple[SiteFuser, list[SiteReport]]:
        """The attentions of one graph fused: all at once, and where the graph breaks, again with each by itself."""
        scope, counted = work.scope, self.verifier.differing
        few = len(work.candidates) * len(scope.graph) <= _MOST_STEPS
        reason, failures = None, Failures()
        for alone in (False, True) if few else (False,):
            before, sites, self.verifier.differing = Snapshot(scope.graph), self._sites(scope), counted
            found: list[SiteReport] | None = None
            with collecting() as met, contained(_ATTENDING, scope.path, before.restore) as attempt:
                found = self._fused(sites, work.candidates, total, alone=alone)
                if sites.unsorted:
                    scope.graph.sort()
            reason, failures = attempt.reason, met
            if found is None or reason is not None:
                continue
            failures.tell()
            with contained(Subject("putting patterns back"), scope.path, work.origin.restore) as attempt:
                found = [as_asked(site, self.plan_context.target) for site in found]
                self.replaced = sites.replaced
                return sites, work.rewriter.settle(found, sites.replaced)
            reason = attempt.reason
            break
        else:
            failures.tell()
        assert reason is not None
        skipped = [SiteReport(label(item.node), scope.path, "skipped", reasons=(reason,)) for item in work.candidates]
        return self._sites(scope), skipped

    def _sites(self, scope: Scope) -> SiteFuser:
        builder = self._builder(scope)
        context = BuildContext(builder, Bounds(scope.facts), Reader(scope.facts), self.plan_context.device, self.opset)
        fixed = self.options, self.catalogue.readers, self.policy, self.album
        return SiteFuser(
            scope, self.model, context, self.verifier, Guards(builder), *fixed, Order(scope.graph), dict(self.replaced)
        )

    def _fused(self, sites: SiteFuser, candidates: Sequence[Candidate], total: int, *, alone: bool) -> list[SiteReport]:
        """Fuses what can be; `alone`: each is undone by itself where the graph breaks by it."""
        if self.plan_context.target == packed.NAME:
            from onnx_attnfuse.fusion.packing.pack import pack

            self.options.progress("packing", len(self.sites), total)
            found, notes = pack(sites, candidates, self.plan_context)
            self.notes += notes
            return found
        found: list[SiteReport] = []
        for candidate in candidates:
            self.options.progress("fusing", len(self.sites) + len(found), total)
            found.append(self._alone(sites, candidate) if alone else sites.fuse(candidate, self.plan_context))
        return found

    def _alone(self, sites: SiteFuser, candidate: Candidate) -> SiteReport:
        before, replaced, unsorted = Snapshot(sites.scope.graph), dict(sites.replaced), sites.unsorted
        name = label(candidate.node)
        with contained(Subject("fusing an attention"), name, before.restore) as attempt:
            found = sites.fuse(candidate, self.plan_context)
            sites.scope.graph.sort()
            return found
        assert attempt.reason is not None
        sites.replaced, sites.unsorted = replaced, unsorted
        return SiteReport(name, sites.scope.path, "skipped", reasons=(attempt.reason,))

    def _builder(self, scope: Scope) -> Builder:
        return Builder(scope.graph, scope.facts, max(scope.opset, self.opset.version), self.names)

    def _enable(self, rules: Sequence[EnablingRule], scope: Scope) -> bool:
        """Applies rewrites around the attention; whether there was anything to do."""
        done: Counter[str] = Counter()
        with self._whole("preparing for fusions of ONNX Runtime", scope) as attempt:
            done = apply_enabling(
                rules, scope, self.model, self._builder(scope), self.verifier, self.plan_context.device.provider
            )
        self.unblocked += done if attempt.reason is None else Counter()
        return bool(done)

    def _settle_imports(self) -> None:
        """Imports com.microsoft where it is used, and lowers an opset that was raised for nothing."""
        for part in (self.model.graph, *self.model.functions.values()):
            imports = self.model.opset_imports if part is self.model.graph else part.opset_imports
            if any(node.domain == _CONTRIB for node in part.all_nodes()):
                imports.setdefault(_CONTRIB, 1)
        if not any(node.op_type == "Attention" and node.domain == "" for node in self.model.graph.all_nodes()):
            self.opset.restore()

    def _patterns(self) -> tuple[PatternReport, ...]:
        """What each pattern did that was tried."""
        entries = ((entry, self.statistics.counts.get(entry.name)) for entry in self.catalogue.entries)
        return tuple(
            PatternReport(entry.name, entry.kind, entry.owner, count.tries, count.hits, count.seconds)
            for entry, count in entries
            if count is not None
        )

    def _around(self) -> list[str]:
        """Lines on what was done that belongs to no single site."""
        notes: list[str] = []
        if not self.verifier.doubts and any(not entry.is_built_in for entry in self.catalogue.entries):
            notes.append("patterns that are not built in are not verified, as onnxruntime is not installed")
        if believed := self.verifier.believed:
            count = f"{len(believed)} place{'s' * (len(believed) > 1)}"
            notes.append(f"{count} of patterns that are not built in could not be verified, the first is {believed[0]}")
        if left := sum(node.graph is not None for node in self.widened):
            notes.append(f"{left} RotaryEmbedding given caches for the whole batch, which ONNX Runtime wants")
        if self.turned:
            notes.append(f"{self.turned} rotary embeddings became RotaryEmbedding where they stand, outside of the attentions")
        if self.opset.raised_from is not None:
            notes.append(f"opset raised from {self.opset.raised_from} to {self.opset.version}, which ai.onnx Attention needs")
        return notes + [f"{count} {what}" for what, count in self.unblocked.items()]
