"""The steps from a model to a fused model and its report, in order: find, read, understand, plan, build, judge, commit."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.assumptions import Assumed
from onnx_attnfuse.catalogue.entries import Catalogue
from onnx_attnfuse.court import Court
from onnx_attnfuse.devices import Device, resolve
from onnx_attnfuse.equations.trace import Trace
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.order import Order
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.heal import widen_caches
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.match.finder import Candidate, find_candidates
from onnx_attnfuse.operators import problem_of_node
from onnx_attnfuse.options import Options
from onnx_attnfuse.packed_sites import pack
from onnx_attnfuse.plan import Planning
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
from onnx_attnfuse.session import session_for, switches_for
from onnx_attnfuse.sites import Sites
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.emitted import Workbench
from onnx_attnfuse.turning import Turning
from onnx_attnfuse.unblock import AFTER, BEFORE, unblock
from onnx_attnfuse.unblock.rule import Rule

_CONTRIB = "com.microsoft"


class Run:
    """One pass over one model."""

    def __init__(self, model: ir.Model, options: Options, court: Court, catalogue: Catalogue, trace: Trace | None = None) -> None:
        self.model = model
        self.options = options
        self.court = court
        self.clock = court.clock
        self.album = Album(model, options.pictures, self.clock)
        self.tally = Tally()
        self.catalogue = dataclasses.replace(catalogue, readers=self.tally.counting(catalogue.readers))
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
        """Fuses what can be fused, in place."""
        start = time.perf_counter()
        before = count_ops(self.model)
        with self.clock.step("find"):
            assumed = Assumed.of(self.options.assume)
            work = [(scope, self._changes(scope), self._candidates(scope)) for scope in scopes(self.model, assumed)]
        self._switch([(scope, candidates) for scope, _, candidates in work])
        total = sum(len(candidates) for _, _, candidates in work)
        pictures: list[SitePicture | None] = []
        for scope, changes, candidates in work:
            self.album.before(candidates, scope)
            with self.clock.step("plan and rewrite"):
                self._scope(scope, changes, candidates, total)
            pictures += self.album.pictures(candidates, len(self.sites) - len(pictures))
        self._settle_imports()
        return self._report(before, time.perf_counter() - start, pictures)

    def _report(self, before: Mapping[str, int], seconds: float, pictures: Sequence[SitePicture | None]) -> Report:
        fused = any(site.status in {"fused", "already-fused"} for site in self.sites)
        device = self.planning.device
        return Report(
            sites=tuple(self.sites),
            seconds=seconds,
            ops_before=before,
            ops_after=count_ops(self.model),
            notes=(*self.notes, *self._around()),
            differing=self.court.differing,
            patterns=self._patterns(),
            policy=self.policy,
            session=session_for(device if fused else Device(device.ep, device.arch)),
            steps=dict(self.clock.seconds),
            pictures=tuple(pictures),
        )

    def _changes(self, scope: Scope) -> Changes:
        """What patterns change in a graph before attention is looked for."""
        builder, keep_outputs = self._builder(scope), self.options.keep_outputs
        changes = Changes(scope, self.model, builder, self.catalogue, self.court, self.tally, keep_outputs)
        with self.clock.step("apply patterns"):
            apply_rules(changes)
            write_operators(changes)
            write_formulas(changes, self.trace)
        return changes

    def _candidates(self, scope: Scope) -> list[Candidate]:
        """The candidates of a graph, after what is to be done before they are read."""
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

    def _scope(self, scope: Scope, changes: Changes, candidates: Sequence[Candidate], total: int) -> None:
        """Fuses the attentions of one graph, then mends what stands around them."""
        builder = self._builder(scope)
        bench = Workbench(builder, Bounds(scope.facts), Reader(scope.facts), self.planning.device, self.opset)
        fixed = self.options, self.catalogue.readers, self.policy, self.album
        sites = Sites(scope, self.model, bench, self.court, Guards(builder), *fixed, Order(scope.graph), self.replaced)
        found = [as_asked(site, self.planning.target) for site in self._fused(sites, candidates, total)]
        found = changes.settle(found, sites.replaced)
        for site in found:
            log_site(site)
        self.sites += found
        self.notes += changes.notes(found)
        turning = Turning(scope, self.model, builder, self.court)
        turned = sum(turning.turn(candidate.spec) for candidate in candidates if candidate.spec is not None)
        self.turned += turned
        if sites.unsorted or turned:
            scope.graph.sort()
        fold(builder.rearranged, builder, "attnfuse/weight")
        sites.guards.spare()
        if candidates:
            self._unblock(AFTER, scope)

    def _fused(self, sites: Sites, candidates: Sequence[Candidate], total: int) -> list[SiteReport]:
        if self.planning.target == packed.NAME:
            self.options.progress("packing", len(self.sites), total)
            found, notes = pack(sites, candidates, self.planning)
            self.notes += notes
            return found
        found: list[SiteReport] = []
        for candidate in candidates:
            self.options.progress("fusing", len(self.sites) + len(found), total)
            found.append(sites.fuse(candidate, self.planning))
        return found

    def _builder(self, scope: Scope) -> Builder:
        return Builder(scope.graph, scope.facts, max(scope.opset, self.opset.version), self.names)

    def _unblock(self, rules: Sequence[Rule], scope: Scope) -> bool:
        """Applies rewrites around the attention; whether there was anything to do."""
        done = unblock(rules, scope, self.model, self._builder(scope), self.court, self.planning.device.ep)
        self.unblocked += done
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
        if left := sum(node.graph is not None for node in self.widened):
            notes.append(f"{left} RotaryEmbedding given caches for the whole batch, which ONNX Runtime wants")
        if self.turned:
            notes.append(f"{self.turned} rotary embeddings became RotaryEmbedding where they stand, outside of the attentions")
        if self.opset.raised_from is not None:
            notes.append(f"opset raised from {self.opset.raised_from} to {self.opset.version}, which ai.onnx Attention needs")
        return notes + [f"{count} {what}" for what, count in self.unblocked.items()]
