"""The steps from a model to a fused model and its report, in order: find, read, understand, plan, build, judge, commit."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.assumptions import Assumed
from onnx_attnfuse.catalogue.entries import Catalogue
from onnx_attnfuse.containment import Attempt, Failures, Subject, collecting, contained, tell
from onnx_attnfuse.court import Court
from onnx_attnfuse.devices import Device, resolve
from onnx_attnfuse.equations.trace import Trace
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.order import Order
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.graph.snapshot import Snapshot
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.heal import widen_caches
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.meaning import understand
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.match.finder import Candidate, find_candidates, read_candidate
from onnx_attnfuse.match.sinks import with_sink
from onnx_attnfuse.match.softmax import find_softmax
from onnx_attnfuse.operators import problem_of_node
from onnx_attnfuse.options import Options
from onnx_attnfuse.packed_sites import pack
from onnx_attnfuse.plan import Planning, make_plans
from onnx_attnfuse.policy import Policy
from onnx_attnfuse.preference import needs_all_kernels
from onnx_attnfuse.report.album import Album
from onnx_attnfuse.report.log import log_site
from onnx_attnfuse.report.model import PatternReport, Report, SiteReport
from onnx_attnfuse.report.picture import SitePicture
from onnx_attnfuse.report.site import as_asked
from onnx_attnfuse.respelling.changes import Changes
from onnx_attnfuse.respelling.formulas import write_formulas
from onnx_attnfuse.respelling.operators import write_operators
from onnx_attnfuse.respelling.rules import apply_rules
from onnx_attnfuse.respelling.tally import Tally
from onnx_attnfuse.rewrite import tidy
from onnx_attnfuse.session import session_for, switches_for
from onnx_attnfuse.sites import Sites
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.emitted import Workbench
from onnx_attnfuse.turning import Turning
from onnx_attnfuse.unblock import AFTER, BEFORE, unblock
from onnx_attnfuse.unblock.rule import Rule

_CONTRIB = "com.microsoft"
_ATTENDING = Subject("fusing the attentions of a graph")
_MOST_STEPS = 20_000_000
"""Nodes times attentions up to which a graph that broke is gone through again, attention by attention."""


@dataclasses.dataclass(frozen=True)
class _Work:
    """One graph and what is to be done in it."""

    scope: Scope
    changes: Changes
    candidates: Sequence[Candidate]
    origin: Snapshot
    """The graph before patterns changed it."""


class Run:
    """One pass over one model."""

    def __init__(self, model: ir.Model, options: Options, court: Court, catalogue: Catalogue, trace: Trace | None = None) -> None:
        self.model = model
        self.options = options
        self.court = court
        self.clock = court.clock
        self.album = Album(model, options.pictures, self.clock)
        self.tally = Tally()
        self.catalogue = dataclasses.replace(
            catalogue, readers=self.tally.counting(catalogue.readers, catalogue.subject, court.doubted)
        )
        self.planning = Planning(resolve(options.ep, options.arch), options.padding, options.dim, options.always, options.target)
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
        told = failures.all()
        return dataclasses.replace(report, failures=told, notes=(*report.notes, *map(str, told)))

    def _all(self) -> Report:
        start = time.perf_counter()
        before = count_ops(self.model)
        with self.clock.step("find"):
            assumed = Assumed.of(self.options.assume)
            work = [self._found(scope) for scope in scopes(self.model, assumed)]
        with contained(Subject("switching kernels off")):
            self._switch([(item.scope, item.candidates) for item in work])
        total = sum(len(item.candidates) for item in work)
        pictures: list[SitePicture | None] = []
        for item in work:
            self.album.before(item.candidates, item.scope)
            with self.clock.step("plan and rewrite"):
                self._scope(item, total)
            pictures += self.album.pictures(item.candidates, len(self.sites) - len(pictures))
        self._settle_imports()
        return self._report(before, time.perf_counter() - start, pictures)

    def _report(self, before: Mapping[str, int], seconds: float, pictures: Sequence[SitePicture | None]) -> Report:
        fused = any(site.status in {"fused", "already-fused"} for site in self.sites)
        device, session = self.planning.device, None
        with contained(Subject("telling what was done")):
            self.notes += self._around()
            session = session_for(device if fused else Device(device.ep, device.arch))
        return Report(
            sites=tuple(self.sites),
            seconds=seconds,
            ops_before=before,
            ops_after=count_ops(self.model),
            notes=tuple(self.notes),
            differing=self.court.differing,
            patterns=self._patterns(),
            policy=self.policy,
            session=session,
            steps=dict(self.clock.seconds),
            pictures=tuple(pictures),
        )

    def _found(self, scope: Scope) -> _Work:
        """What patterns change in a graph, then its attentions."""
        origin = Snapshot(scope.graph)
        changes, fresh = self._changes(scope), self._changes(scope)
        with self.clock.step("apply patterns"), self._whole("applying patterns", scope) as attempt:
            apply_rules(changes)
            write_operators(changes)
            write_formulas(changes, self.trace)
        changes = changes if attempt.reason is None else fresh
        candidates: list[Candidate] = []
        with contained(Subject("looking for attention"), scope.path):
            candidates = self._candidates(scope)
        return _Work(scope, changes, candidates, origin)

    def _changes(self, scope: Scope) -> Changes:
        """What patterns will change in a graph."""
        return Changes(
            scope,
            self.model,
            self._builder(scope),
            self.catalogue,
            self.court,
            self.tally,
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
        bench = self._sites(scope).bench
        bench.builder.at(node)
        with contained(Subject("planning an attention"), label(node), lambda: tidy(bench.builder)):
            meaning = understand(found.spec, bench.reader)
            plans, _ = make_plans(found.spec, meaning, self.planning, bench)
            tidy(bench.builder)
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
        return find_candidates(scope, readers, keep_outputs) if found and self._unblock(BEFORE, scope) else found

    def _switch(self, work: Sequence[tuple[Scope, Sequence[Candidate]]]) -> None:
        """Plans with the kernels that the policy leaves; where operators are there that may need the others, all are left."""
        device = self.planning.device
        told = dataclasses.replace(device, switches=switches_for(self.policy, device))
        standing = [(item.node, scope) for scope, items in work for item in items if item.softmax is None and item.spec is None]
        needy = [node for node, scope in standing if needs_all_kernels(problem_of_node(node, scope.facts), told)]
        if needy:
            self.notes.append(f"no kernel is switched off: operators that are there may need it, the first is '{needy[0].name}'")
            told = dataclasses.replace(device, switches=switches_for(self.policy, device, may_switch_off=False))
        self.planning = dataclasses.replace(self.planning, device=told)

    def _scope(self, work: _Work, total: int) -> None:
        """Fuses the attentions of one graph, then mends what stands around them."""
        scope, candidates = work.scope, work.candidates
        sites, found = self._attended(work, total)
        with contained(Subject("telling of sites")):
            for site in found:
                log_site(site)
            self.notes += work.changes.notes(found)
        self.sites += found
        builder = sites.bench.builder
        with self._whole("replacing rotary embeddings", scope):
            turning = Turning(scope, self.model, builder, self.court)
            turned = sum(turning.turn(candidate.spec) for candidate in candidates if candidate.spec is not None)
            if turned:
                scope.graph.sort()
            self.turned += turned
        with self._whole("folding constants", scope):
            fold(builder.rearranged, builder, "attnfuse/weight")
        with self._whole("moving what only some batches need", scope):
            sites.guards.spare()
        if candidates:
            self._unblock(AFTER, scope)

    def _attended(self, work: _Work, total: int) -> tuple[Sites, list[SiteReport]]:
        """The attentions of one graph fused: all at once, and where the graph breaks, again with each by itself."""
        scope, counted = work.scope, self.court.differing
        few = len(work.candidates) * len(scope.graph) <= _MOST_STEPS
        reason, failures = None, Failures()
        for alone in (False, True) if few else (False,):
            before, sites, self.court.differing = Snapshot(scope.graph), self._sites(scope), counted
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
                found = [as_asked(site, self.planning.target) for site in found]
                self.replaced = sites.replaced
                return sites, work.changes.settle(found, sites.replaced)
            reason = attempt.reason
            break
        else:
            failures.tell()
        assert reason is not None
        skipped = [SiteReport(label(item.node), scope.path, "skipped", reasons=(reason,)) for item in work.candidates]
        return self._sites(scope), skipped

    def _sites(self, scope: Scope) -> Sites:
        builder = self._builder(scope)
        bench = Workbench(builder, Bounds(scope.facts), Reader(scope.facts), self.planning.device, self.opset)
        fixed = self.options, self.catalogue.readers, self.policy, self.album
        return Sites(scope, self.model, bench, self.court, Guards(builder), *fixed, Order(scope.graph), dict(self.replaced))

    def _fused(self, sites: Sites, candidates: Sequence[Candidate], total: int, *, alone: bool) -> list[SiteReport]:
        """Fuses what can be; `alone`: each is undone by itself where the graph breaks by it."""
        if self.planning.target == packed.NAME:
            self.options.progress("packing", len(self.sites), total)
            found, notes = pack(sites, candidates, self.planning)
            self.notes += notes
            return found
        found: list[SiteReport] = []
        for candidate in candidates:
            self.options.progress("fusing", len(self.sites) + len(found), total)
            found.append(self._alone(sites, candidate) if alone else sites.fuse(candidate, self.planning))
        return found

    def _alone(self, sites: Sites, candidate: Candidate) -> SiteReport:
        before, replaced, unsorted = Snapshot(sites.scope.graph), dict(sites.replaced), sites.unsorted
        name = label(candidate.node)
        with contained(Subject("fusing an attention"), name, before.restore) as attempt:
            found = sites.fuse(candidate, self.planning)
            sites.scope.graph.sort()
            return found
        assert attempt.reason is not None
        sites.replaced, sites.unsorted = replaced, unsorted
        return SiteReport(name, sites.scope.path, "skipped", reasons=(attempt.reason,))

    def _builder(self, scope: Scope) -> Builder:
        return Builder(scope.graph, scope.facts, max(scope.opset, self.opset.version), self.names)

    def _unblock(self, rules: Sequence[Rule], scope: Scope) -> bool:
        """Applies rewrites around the attention; whether there was anything to do."""
        done: Counter[str] = Counter()
        with self._whole("preparing for fusions of ONNX Runtime", scope) as attempt:
            done = unblock(rules, scope, self.model, self._builder(scope), self.court, self.planning.device.ep)
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
        entries = ((entry, self.tally.counts.get(entry.name)) for entry in self.catalogue.entries)
        return tuple(
            PatternReport(entry.name, entry.kind, entry.owner, count.tries, count.hits, count.seconds)
            for entry, count in entries
            if count is not None
        )

    def _around(self) -> list[str]:
        """Lines on what was done that belongs to no single site."""
        notes: list[str] = []
        if not self.court.doubts and any(not entry.is_built_in for entry in self.catalogue.entries):
            notes.append("patterns that are not built in are not verified, as onnxruntime is not installed")
        if believed := self.court.believed:
            count = f"{len(believed)} place{'s' * (len(believed) > 1)}"
            notes.append(f"{count} of patterns that are not built in could not be verified, the first is {believed[0]}")
        if left := sum(node.graph is not None for node in self.widened):
            notes.append(f"{left} RotaryEmbedding given caches for the whole batch, which ONNX Runtime wants")
        if self.turned:
            notes.append(f"{self.turned} rotary embeddings became RotaryEmbedding where they stand, outside of the attentions")
        if self.opset.raised_from is not None:
            notes.append(f"opset raised from {self.opset.raised_from} to {self.opset.version}, which ai.onnx Attention needs")
        return notes + [f"{count} {what}" for what, count in self.unblocked.items()]
