"""The steps from a model to a fused model and its report, in order: find, read, understand, plan, build, judge, commit."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.catalogue.entries import Catalogue
from onnx_attnfuse.court import Court
from onnx_attnfuse.devices import resolve
from onnx_attnfuse.equations.trace import Trace
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.heal import widen_caches
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.match.finder import Candidate, find_candidates
from onnx_attnfuse.options import Options
from onnx_attnfuse.packed_sites import pack
from onnx_attnfuse.plan import Policy
from onnx_attnfuse.report.album import Album
from onnx_attnfuse.report.model import PatternReport, Report, SiteReport
from onnx_attnfuse.report.picture import SitePicture
from onnx_attnfuse.report.site import as_asked
from onnx_attnfuse.respelling.changes import Changes
from onnx_attnfuse.respelling.formulas import write_formulas
from onnx_attnfuse.respelling.operators import write_operators
from onnx_attnfuse.respelling.rules import apply_rules
from onnx_attnfuse.respelling.tally import Tally
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
        self.policy = Policy(resolve(options.ep, options.arch), options.padding, options.dim, options.always, options.target)
        self.names = all_names(model)
        self.opset = Opset(model, asked=options.target == "onnx.Attention")
        self.sites: list[SiteReport] = []
        self.notes: list[str] = []
        self.widened: list[ir.Node] = []
        self.turned = 0
        self.unblocked: Counter[str] = Counter()
        self.trace = trace

    def go(self) -> Report:
        """Fuses what can be fused, in place."""
        start = time.perf_counter()
        before = count_ops(self.model)
        with self.clock.step("find"):
            work = [(scope, self._changes(scope), self._candidates(scope)) for scope in scopes(self.model)]
        total = sum(len(candidates) for _, _, candidates in work)
        pictures: list[SitePicture | None] = []
        for scope, changes, candidates in work:
            self.album.before(candidates, scope)
            with self.clock.step("plan and rewrite"):
                self._scope(scope, changes, candidates, total)
            pictures += self.album.pictures(candidates, len(self.sites) - len(pictures))
        self._settle_imports()
        notes = (*self.notes, *self._around())
        seconds = time.perf_counter() - start
        return Report(
            tuple(self.sites),
            seconds,
            before,
            count_ops(self.model),
            notes,
            self.court.differing,
            self._patterns(),
            dict(self.clock.seconds),
            tuple(pictures),
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

    def _scope(self, scope: Scope, changes: Changes, candidates: Sequence[Candidate], total: int) -> None:
        """Fuses the attentions of one graph, then mends what stands around them."""
        builder = self._builder(scope)
        bench = Workbench(builder, Bounds(scope.facts), Reader(scope.facts), self.policy.device, self.opset)
        sites = Sites(scope, self.model, bench, self.court, Guards(builder), self.options, self.catalogue.readers, self.album)
        found = [as_asked(site, self.policy.target) for site in self._fused(sites, candidates, total)]
        found = changes.settle(found, sites.replaced)
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
        if self.policy.target == packed.NAME:
            self.options.progress("packing", len(self.sites), total)
            found, notes = pack(sites, candidates, self.policy)
            self.notes += notes
            return found
        found: list[SiteReport] = []
        for candidate in candidates:
            self.options.progress("fusing", len(self.sites) + len(found), total)
            found.append(sites.fuse(candidate, self.policy))
        return found

    def _builder(self, scope: Scope) -> Builder:
        return Builder(scope.graph, scope.facts, max(scope.opset, self.opset.version), self.names)

    def _unblock(self, rules: Sequence[Rule], scope: Scope) -> bool:
        """Applies rewrites around the attention; whether there was anything to do."""
        done = unblock(rules, scope, self.model, self._builder(scope), self.court, self.policy.device.ep)
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
