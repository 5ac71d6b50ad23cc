"""A pass of the pipeline and its context: one graph with the results of earlier passes, in a run over one model."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match.candidates import Candidate, find_candidates, read_candidate
from onnx_attnfuse.attention.match.softmax import find_softmax, with_sink
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import PatternRewriter, PatternStatistics
from onnx_attnfuse.fusion.plan import PlanContext, make_plans
from onnx_attnfuse.fusion.roundings import LeftOut, Moved
from onnx_attnfuse.fusion.runtime_dispatch import Guards
from onnx_attnfuse.fusion.shared_cache.decoder import Merged, SharedCache
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.graph.build import builder_for
from onnx_attnfuse.graph.edit import Snapshot
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.opset import Opset
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.graph.quantised_operators import DecomposedOperators
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops
from onnx_attnfuse.kernels.conformance import table_for
from onnx_attnfuse.kernels.device import resolve, runtime_version
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.language.matcher.match_state import Trace
from onnx_attnfuse.language.registry.registry import Catalogue
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import CaptureReport, MixerReport, NodesOfRole, RoundingReport, SiteReport
from onnx_attnfuse.report.pictures.album import Album
from onnx_attnfuse.report.pictures.model import SitePicture
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention, QuantisedCache
from onnx_attnfuse.verify.verifier import Verifier

Undo: TypeAlias = Callable[[], object]


class Run:
    """One run over one model: its options, the state that its graphs share, and its report."""

    def __init__(
        self,
        model: ir.Model,
        options: Options,
        catalogue: Catalogue,
        verifier: Verifier,
        trace: Trace | None = None,
        dtype: ir.DataType | None = None,
        tried: Run | None = None,
    ) -> None:
        self.model, self.options, self.verifier, self.trace, self.dtype = model, options, verifier, trace, dtype
        self.tried = tried
        """The run over what the model was replaced by, of which nothing came: this one replaces it by nothing."""
        self.start = time.perf_counter()
        self.merged: Merged | None = None
        """The merged decoder that this decoder with a past was extracted from, if any."""
        self.readers = catalogue.readers
        """The readers of single steps, where they are not counted."""
        self.statistics = PatternStatistics()
        readers = self.statistics.counting(catalogue.readers, catalogue.subject, verifier.doubted)
        self.catalogue = dataclasses.replace(catalogue, readers=readers)
        self.runtime = runtime_version(options.onnxruntime, resolve(options.ep, options.arch).provider)
        """The version of ONNX Runtime that the model will run on; None is the newest."""
        self.policy = Policy.from_environment() if options.policy is None else options.policy
        self.graphs: list[PassContext] = []
        """The graphs of the model that were read, outer before inner."""
        self.version = 0
        """How many passes have changed something."""
        self.replaced: dict[ir.Value, ir.Value] = {}
        """Results that were replaced, in all graphs, and their replacements."""
        self.sites: list[SiteReport] = []
        self.mixers: list[MixerReport] = []
        self.notes: list[str] = []
        self.pictures: list[SitePicture | None] = []
        self.widened: list[ir.Node] = []
        """The RotaryEmbedding nodes whose caches were widened."""
        self.enabled: Counter[str] = Counter()
        """How often each enabling rule was applied."""
        self.decomposed: Counter[str] = Counter()
        """How many operators of other execution providers were decomposed, by their names."""
        self.decomposed_cached: Counter[str] = Counter() if tried is None else tried.decomposed_cached
        """How many operators with a past were decomposed, by their names."""
        self.changes: Counter[str] = Counter()
        """The counts of each pass, by its name."""
        self.failure: Reason | None = None
        """Why the last pass on the model that failed did."""
        self.session: Session | None = None
        self.capture: CaptureReport | None = None
        self.kv_cache: QuantisedCache | None = None
        self.dequantised: DequantisedAttention | None = None

    def take_model(self) -> None:
        """Records facts about the model, once passes on the whole of it have given it its form."""
        model, options, taken = self.model, self.options, self.options.assumed
        self.source = model.clone() if options.dequantise_attention else None
        """The model as it was, where it is to be compared with the result."""
        self.ops_before = count_ops(model)
        self.album = Album(model, options.pictures, self.verifier.timer)
        device = resolve(options.ep, options.arch)
        table = table_for(device.ep, options.conformance)
        lengths = Facts(model.graph, assumed=taken).numbers(options.dim) if options.dim else options.dim
        by_rows = options.target == packed.NAME and "packed-rows" in device.provider.pays
        chosen = options.padding, lengths, options.always, "auto" if by_rows else options.target
        captured, dtype = options.cuda_graph, self.dtype
        self.plan_context = PlanContext(
            device, *chosen, dtype=dtype, taken=taken, provable=options.provable, captured=captured, conformance=table
        )
        self.names = all_names(model)
        self.opset = Opset(model, asked=options.target == "onnx.Attention")

    @property
    def shared(self) -> SharedCache:
        """The outcome of sharing the cache of the main graph, which is read first."""
        return self.graphs[0].shared if self.graphs else SharedCache()

    @functools.cached_property
    def total(self) -> int:
        """The number of candidates in all graphs, once they are found."""
        return sum(len(graph.candidates) for graph in self.graphs)


class PassContext:
    """One graph in a run, with the results of passes so far."""

    def __init__(self, run: Run, scope: Scope) -> None:
        self.run, self.scope = run, scope
        self.origin = Snapshot(scope.graph)
        """The graph before the first pass."""
        self.names = frozenset(node.name for node in scope.graph if node.name)
        """The names of its nodes then."""
        self._snapshot, self._version = self.origin, run.version
        self.patterns = self.pattern_rewriter()
        """The pattern rewrites that were applied."""
        self.candidates: list[Candidate] = []
        self.left_out: list[LeftOut] = []
        """The roundings that were taken out of attentions."""
        self.quantised = DecomposedOperators()
        """The operators on quantised numbers that are decomposed."""
        self.moved: list[Moved] = []
        """The tensors around attentions whose roundings were moved."""
        self.roles: dict[str, tuple[NodesOfRole, ...]] = {}
        """For each site the nodes of the source by role, as they were found first."""
        self.roundings: dict[str, tuple[RoundingReport, ...]] = {}
        """For each site the roundings of the source, likewise."""
        self.searched: int | None = None
        """The version of the run in which candidates were looked for."""
        self.fused: tuple[SiteFuser, list[SiteReport]] | None = None
        """The fuser of the candidates, and a report on each; None: fusing has failed, or was not begun."""
        self.shared = SharedCache()
        """The outcome of sharing the cache of this graph; attentions that share its buffer are no candidates any more."""
        self.failure: Reason | None = None
        """Why the last pass that failed did."""

    def found(self) -> list[Candidate]:
        """The attentions of the graph as it is now."""
        found = find_candidates(self.scope, self.run.catalogue.readers, self.run.options.keep_outputs)
        return [item.called(self.quantised.names) for item in found]

    def snapshot(self) -> Snapshot:
        """The graph as it is, written down anew only where a pass has changed something since."""
        if self._version != self.run.version:
            self._snapshot, self._version = Snapshot(self.scope.graph), self.run.version
        return self._snapshot

    def to_last(self) -> Undo:
        """The undo of the next pass: puts the graph back to the state before that pass."""
        snapshot, fused, shared, replaced = self.snapshot(), self.fused, self.shared, self.run.replaced

        def undo() -> None:
            snapshot.restore()
            self.fused, self.shared, self.run.replaced = fused, shared, replaced

        return undo

    def to_origin(self) -> Undo:
        """The undo of all passes: puts the graph back to the state before the first."""

        def undo() -> None:
            self.origin.restore()
            self.fused, self.shared = None, SharedCache()
            self.run.version += 1

        return undo

    def graph_context(self) -> GraphContext:
        """A context for rewriting the graph; each pass takes its own, as new nodes are shared in graph order."""
        run, scope = self.run, self.scope
        builder = builder_for(scope, run.names, run.opset.version)
        return GraphContext(scope, run.model, builder, run.verifier)

    def pattern_rewriter(self) -> PatternRewriter:
        """A rewriter that no pattern has gone through yet."""
        run = self.run
        return PatternRewriter(
            self.graph_context(), run.catalogue, run.statistics, run.options.keep_outputs, kind_of=self.kind_of
        )

    def site_fuser(self) -> SiteFuser:
        """The fuser that fused the attentions of the graph, or a new one."""
        return self.new_site_fuser() if self.fused is None else self.fused[0]

    def new_site_fuser(self) -> SiteFuser:
        """A fuser that has fused nothing yet."""
        run, graph = self.run, self.graph_context()
        guards, order, replaced = Guards(graph.builder), NodeOrder(self.scope.graph), dict(run.replaced)
        fixed = run.options, run.catalogue.readers, run.policy, run.album
        return SiteFuser(graph, self._build_context(graph), guards, *fixed, order, replaced)

    def _build_context(self, graph: GraphContext) -> BuildContext:
        facts = self.scope.facts
        return BuildContext(graph.builder, Bounds(facts), Reader(facts), self.run.plan_context.device, self.run.opset)

    def read_at(self, node: ir.Node) -> Candidate | None:
        """The attention at a node as it can be read now; None where the node is no Softmax."""
        run, scope = self.run, self.scope
        softmax = find_softmax(node, scope.facts, scope.opset)
        if softmax is None:
            return None
        return read_candidate(node, with_sink(softmax, scope.facts), scope, run.catalogue.readers, run.options.keep_outputs)

    def kind_of(self, node: ir.Node) -> str | None:
        """The kind of mask of the attention at a Softmax, if it can be planned as it is."""
        run, found = self.run, self.read_at(node)
        if found is None or found.spec is None:
            return None
        graph = self.graph_context()
        context = self._build_context(graph)
        with graph.rewrite(node, Subject("planning an attention")):
            meaning = understand(found.spec, context.reader)
            plans, _ = make_plans(found.spec, meaning, run.plan_context, context)
            return meaning.kind if plans and meaning.nan is None else None
        return None


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over a graph."""

    name: str
    """The action, as a failure is reported."""
    apply: Callable[[Any], int]
    """Does it to a graph, a `PassContext`, and counts changes; 0: the graph is unchanged."""
    step: str | None = None
    """The step whose time it counts for."""
    undo: Callable[[Any], Undo] | None = PassContext.to_last
    """The function that restores the graph where the pass fails; None: it changes no node."""
    must_succeed: bool = False
    """Whether a failure ends the run, as a partial change cannot be undone."""


@dataclasses.dataclass(frozen=True)
class ModelPass(Pass):
    """One pass over the whole model, when all graphs have come so far: `apply` takes the `Run`, whose model it may replace."""

    undo: Callable[[Any], Undo] | None = None
