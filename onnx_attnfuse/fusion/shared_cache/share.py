"""The cache of a decoder as one buffer of a fixed length, where that is asked for: all of its attentions, or none.

    shared = Sharing(graph, context, plan_context, ...).share(candidates)

The past as an input and the present as an output get the length of the buffer, `max_sequence_length`; the mask tells lengths.
The result is run in a loop against the source before it is kept (`verify/decoder_loop.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.assumed import assumed_by
from onnx_attnfuse.attention.masks.classify import understand
from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.bodies.paged_attention import put_in_place
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.fusion.commit import check_lengths
from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.plan import PlanContext, params_of
from onnx_attnfuse.fusion.report_site import kernel_of_forecast, unfused
from onnx_attnfuse.fusion.shared_cache.compaction import Compaction, buffer_order, new_order
from onnx_attnfuse.fusion.shared_cache.decoder import Merged, SharedCache, left, note_on, renamed, why_no_cache
from onnx_attnfuse.fusion.shared_cache.interface import added_mask, drop_idle, encoded, finish_interface, read_interface
from onnx_attnfuse.fusion.shared_cache.lengths import (
    Lengths,
    Padding,
    answer_for_past,
    finish_source,
    grow,
    prepare,
    read_lengths,
    source_of,
)
from onnx_attnfuse.fusion.shared_cache.paged import pack
from onnx_attnfuse.fusion.shared_cache.positions import PositionTables, counted
from onnx_attnfuse.fusion.shared_cache.sites import (
    Attended,
    CachedSite,
    attend,
    check_together,
    evicting,
    give_out,
    has_window,
    is_fitted,
    read_site,
    with_leaders,
    with_shared_heads,
)
from onnx_attnfuse.fusion.shared_cache.static import is_static, read_static
from onnx_attnfuse.graph.assumptions import AssumptionName, named_in_order
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.edit import Snapshot
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.graph.sizes import resolved
from onnx_attnfuse.kernels.execution_provider import OpSupport
from onnx_attnfuse.kernels.forecast import forecast
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.targets import TARGETS
from onnx_attnfuse.targets import group_query_attention as target
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.group_query_attention import Places
from onnx_attnfuse.targets.operand_products import merge_products
from onnx_attnfuse.targets.rms_norm import take_in_norms
from onnx_attnfuse.transforms.rewriting import Edit, GraphContext
from onnx_attnfuse.verify.decoder_feeds import Loop
from onnx_attnfuse.verify.verdict import Verified

_TARGET = next(item for item in TARGETS if item.INFO.key == target.INFO.key)
_SHARING = Subject("sharing the buffer of the cache")
_PARTS = 2
"""Keys and values."""


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The attentions of one graph on their way to one buffer."""

    graph: GraphContext
    context: BuildContext
    """The builder of attentions and its facts."""
    plan_context: PlanContext
    """The target of the plan, and assumptions about padding."""
    merged: Merged | None
    """The decoder that the model was made from, which the result is then compared with."""
    context_length: int | None
    """How many positions there will be at most, where a caller says so."""
    is_quantised: bool
    """Whether the cache is to be quantised afterwards."""
    is_paged: bool
    """Whether the cache is to be in pages, for the tokens of many requests."""
    runtime: tuple[int, int] | None
    """The older of the ONNX Runtimes that the model will run on and is judged by; None: the newest."""
    window_cache: bool = False
    """Whether buffers of attentions with a window keep no more than that, where this is asked for."""
    reports: dict[ir.Node, SiteReport] = dataclasses.field(default_factory=dict["ir.Node", SiteReport])
    """The reports on attentions as far as they have come."""

    def _is_from(self, since: tuple[int, int] | None) -> bool:
        """Whether the model runs on an ONNX Runtime of a version or a newer one; None: no version will do."""
        return since is not None and (self.runtime is None or self.runtime >= since)

    @property
    def _support(self) -> OpSupport:
        """The record of the operator on the provider."""
        return supported(target.INFO.key, self.plan_context.device.provider)

    @property
    def _on_host(self) -> bool:
        """Whether sizes lie where the model runs."""
        return self.plan_context.device.provider.capture is None

    def share(self, candidates: Sequence[Candidate]) -> SharedCache:
        """Makes the cache of the graph one buffer, or leaves all as it was."""
        scope = self.graph.scope
        if scope.graph is not self.graph.model.graph:
            return SharedCache()
        read = [(item, item.spec) for item in candidates if item.spec is not None]
        cached = [item for item, spec in read if spec.cache is not None or is_static(spec, scope.facts)]
        if not cached:
            return SharedCache(note=why_no_cache(scope.graph))
        sites, reasons = self._read(cached)
        if reasons:
            return left(reasons)
        snapshot, facts = Snapshot(scope.graph), scope.facts
        held = [*scope.graph.inputs, *(indexed.value for site in sites for indexed in site.cache.present)]
        origins, shapes = dict(facts.origins), [(value, facts.dims(value)) for value in held]

        def undo() -> None:
            snapshot.restore()
            facts.origins.clear()
            facts.origins.update(origins)
            for value, dims in shapes:
                facts.record(value, dims, None)

        with contained(_SHARING, scope.path, undo) as attempt:
            rest = [spec for item, spec in read if item not in cached]
            found = self._shared(sites, encoded(rest, facts))
            return dataclasses.replace(found, candidates=tuple(item for item in cached if item.node in found.sites))
        assert attempt.reason is not None
        return left({item.node: attempt.reason for item in cached})

    def _read(self, cached: Sequence[Candidate]) -> tuple[list[CachedSite], dict[ir.Node, Reason]]:
        """The attentions as sites, and why some cannot be."""
        sites, reasons = list[CachedSite](), dict[ir.Node, Reason]()
        for candidate in cached:
            assert candidate.spec is not None
            try:
                sites.append(self._site(candidate, with_shared_heads(candidate.spec)))
            except Refused as refused:
                reasons[candidate.node] = refused.reason
        if reasons:
            return sites, reasons
        try:
            may_follow = not self.is_paged and self._is_from(self._support.reads_without_new_keys_from)
            sites = with_leaders(sites, may_follow=may_follow)
            if self.window_cache and self._is_from(self._support.evicts_from):
                sites = evicting(sites, self.context_length)
            check_together(sites, self.graph.scope.facts)
            self._check_assumed(sites)
        except Refused as refused:
            reasons = {candidate.node: refused.reason for candidate in cached}
        return sites, reasons

    def _site(self, candidate: Candidate, spec: AttentionSpec) -> CachedSite:
        graph = self.graph
        check_lengths(spec)
        meaning = graph.check_mask(spec, understand(spec, self.context.reader))
        found = dataclasses.replace(
            unfused(candidate, graph.scope),
            mask=meaning.kind,
            mask_text=meaning.text or None,
            assumptions=assumed_by(spec, meaning, graph.scope.facts),
        )
        self.reports[candidate.node] = found
        read = read_site if spec.cache is not None else read_static
        site = read(candidate.node, spec, meaning, self.context)
        if self.is_paged and meaning.biases:
            raise Refused("mask-form", "attention to pages takes no bias, only a causal triangle and a window", spec.name)
        if is_fitted(site, graph.scope.facts):
            self.reports[candidate.node] = dataclasses.replace(found, assumptions=named_in_order(*found.assumptions, "masks-fit"))
        return site

    def _check_assumed(self, sites: Sequence[CachedSite]) -> None:
        """Checks the assumptions of a buffer of real tokens.

        Raises:
            Refused: A caller has taken it back.
        """
        assumed = self.graph.scope.facts.assumed.names
        if not self._is_padded(sites):
            return
        if "padded-rows-unused" not in assumed:
            raise Refused("padding-kept", "the results at padding differ, and are not assumed to be unused")
        if has_window(sites) and "padding-at-the-ends" not in assumed:
            raise Refused("padding-kept", "a window counts padding between tokens, which is not assumed to be at the ends")

    def _is_padded(self, sites: Sequence[CachedSite]) -> bool:
        return sites[0].mask is not None and self.plan_context.padding != "assume-none" and not self.is_paged

    def _shared(self, sites: Sequence[CachedSite], crossed: Sequence[tuple[ir.Value, ir.Value]]) -> SharedCache:
        """Builds the buffer, and has the whole model judged.

        Args:
            sites: The attentions with a cache.
            crossed: Keys and values that an encoder made, of the others.

        Raises:
            Refused: It cannot be built, or differs.
        """
        graph = self.graph
        before = graph.model.clone()
        idle = drop_idle(graph.model.graph)
        source = read_interface(graph.model.graph, graph.scope.facts, sites, crossed)
        presents = {*source.present_keys, *source.present_values}
        outputs = [value.name or "" for value in graph.model.graph.outputs if value.name not in presents]
        filled = source_of(sites[0], graph.scope.facts)
        with graph.rewrite(next(iter(graph.model.graph)), _SHARING, graph.scope.path) as edit:
            mask = sites[0].mask or added_mask(graph.model.graph, self.context.builder, sites[0])
            decoder = dataclasses.replace(source, attention_mask=mask.name or "")
            lengths, attended = self._attended(sites, mask, edit)
            if self.is_paged:
                attended, decoder = pack(graph.model.graph, self.context.builder, attended, decoder, mask)
            decoder = finish_interface(graph.model.graph, self.context.builder, attended, decoder, lengths)
            bounds = [item for item in (decoder.context_length, self.context_length) if item is not None]
            decoder = dataclasses.replace(decoder, context_length=min(bounds, default=None))
            loop = Loop(
                tokens=decoder.input_ids or decoder.inputs_embeds or "",
                mask=mask.name or "",
                ends_anywhere=decoder.mask_ends_anywhere,
                is_padded=self._is_padded(sites),
                positions=source.position_ids,
                pasts=renamed(source, decoder, "past"),
                presents=renamed(source, decoder, "present"),
                outputs=tuple(outputs),
                any_padding=self._may_rearrange(sites),
                only_ends=has_window(sites),
                numbers=self.plan_context.fixed,
                takes_chunks=decoder.takes_chunks,
                windows=tuple(window for window in decoder.cache_windows for _ in range(_PARTS)),
                rotates_each_token=self.plan_context.device.provider.rotates_each_token,
                filled=filled,
                pages=decoder.pages,
            )
            reports = {item.site.node: self._report(item, sites) for item in attended}
            if self.is_paged and not self._runs_pages(sites[0]):  # attentions that are found again, and fused as any other
                reports.clear()
                for item in attended:
                    put_in_place(self.context.builder, item.node)
            check = self._check(before, loop)
            verified = check()
            reports = {node: dataclasses.replace(report, verified=verified) for node, report in reports.items()}
            note = note_on(
                decoder,
                adds_mask=sites[0].mask is None,
                rearranged=self._may_rearrange(sites),
                has_chunks=self._has_chunks(sites),
                window_cache=self.window_cache,
                idle=idle,
            )
            tables = counted(self.context.builder).name if any(item.has_tables for item in attended) else None
            return SharedCache(decoder, reports, note=note, source=before, loop=loop, check=check, tables=tables)
        assert edit.reason is not None
        raise Refused(edit.reason.code, edit.reason.message, edit.reason.node)

    def _check(self, before: ir.Model, loop: Loop) -> Callable[[], Verified | None]:
        """The judge of the rewritten model: beside the source as it is called, before the model was made of it."""
        check, model = self.graph.verifier.check_loop, self.graph.model
        if self.merged is None:
            return functools.partial(check, before, model, loop)
        return functools.partial(self.merged.check, check, before, model, loop)

    def _attended(self, sites: Sequence[CachedSite], mask: ir.Value, edit: Edit) -> tuple[Lengths, list[Attended]]:
        """Puts operators that share the buffer in the place of attentions."""
        graph, builder, axes = self.graph.model.graph, self.context.builder, sites[0].spec.axes
        provider = self.plan_context.device.provider
        new = resolved(length(axes.i), self.plan_context.fixed)
        sizes = length(axes.b), new, sites[0].past_length
        prepare(graph, builder, sites[0], mask)
        has_counts = self._takes_chunks(sites)
        lengths = read_lengths(
            builder,
            mask,
            *sizes,
            self._padding(sites),
            on_host=self._on_host,
            takes_counts=has_counts,
            evicts=any(site.evicts for site in sites),
        )
        for past in (value for site in sites for value in site.past):
            answer_for_past(builder, past)
        grow(builder, sites)
        builder.at(next(iter(graph)))
        is_rearranged = self._may_rearrange(sites) and new != 1
        compaction = self._compaction(sites, lengths) if is_rearranged else None
        is_biased = self._is_padded(sites) and any(site.meaning.biases for site in sites)
        columns = buffer_order(builder, lengths.earlier, lengths.new) if is_biased else None
        places = Places(None if compaction is None or columns is None else compaction.order.front, columns)
        buffered = dataclasses.replace(lengths.buffered, is_rearranged=is_rearranged, places=places, rotates=not self.is_paged)
        order = NodeOrder(graph)
        has_tables = "position-tables" in provider.pays and "indices-in-range" in builder.facts.assumed.names
        tables = PositionTables(builder) if has_tables and self.context_length is not None and not self.is_paged else None
        found: dict[ir.Node, Attended] = {}
        for site in sites:
            leader = None if site.leader is None else found[site.leader]
            found[site.node] = attend(site, buffered, self.context, order, edit, tables=tables, leader=leader)
        attended = [*found.values()]
        for item in attended:
            give_out(item, builder)
        finish_source(graph, builder, sites, mask)
        if target.takes_in_norms(self.context) and not (self.is_quantised or self.is_paged):  # not shown to be right together
            for item in attended:
                take_in_norms(item.node, builder)
        if target.merges_projections(self.context):
            for item in attended:
                merge_products(item.node, builder)
        if compaction is not None:
            compaction.apply([item.node for item in attended])
        graph.sort()
        return lengths, attended

    def _has_chunks(self, sites: Sequence[CachedSite]) -> bool:
        """Whether there may be several entries with several new tokens each."""
        axes = sites[0].spec.axes
        return all(resolved(length(axis), self.plan_context.fixed) != 1 for axis in (axes.b, axes.i))

    def _takes_chunks(self, sites: Sequence[CachedSite]) -> bool:
        """Whether every operator takes the number of new tokens, so that there may be several of several entries."""
        appends = all(site.leader is None for site in sites)  # without new keys the operator takes no number of them
        return appends and self._has_chunks(sites) and self._is_from(self._support.counts_rows_from)

    def _padding(self, sites: Sequence[CachedSite]) -> Padding:
        """Where padding lies in the mask."""
        if sites[0].mask is None:
            return "unknown"
        if not self._is_padded(sites):
            return "none"
        return "anywhere" if self._may_rearrange(sites) else "after"

    def _may_rearrange(self, sites: Sequence[CachedSite]) -> bool:
        """Whether padding may lie anywhere, and not only after the tokens of a prompt."""
        return self._is_padded(sites) and self.plan_context.padding != "assume-right"

    def _compaction(self, sites: Sequence[CachedSite], lengths: Lengths) -> Compaction:
        """The rearrangement that puts padding after the real tokens, wherever the attentions see them."""
        used, axes = self.context.builder, sites[0].spec.axes
        builder = Builder(used.graph, used.facts, used.opset, used.names)  # shares no node with rearranged values
        builder.at(next(iter(self.graph.model.graph)))
        tokens = Tokens(builder.facts, length(axes.b), length(axes.i))
        return Compaction(builder, tokens, new_order(builder, lengths.new, on_host=self._on_host))

    def _runs_pages(self, site: CachedSite) -> bool:
        """Whether the execution provider has a kernel that attends to pages."""
        return site.spec.dtype in HALVES and self._is_from(self.plan_context.device.provider.pages_from)

    def _report(self, attended: Attended, sites: Sequence[CachedSite]) -> SiteReport:
        """The report on one attention."""
        site, plan_context = attended.site, self.plan_context
        assumed: set[AssumptionName] = set()
        if self._is_padded(sites):
            assumed = {"padded-rows-unused", *(("padding-at-the-ends",) if has_window([site]) else ())}
        if attended.has_tables:
            assumed |= {"indices-in-range"}
        found = self.reports[site.node]
        (encoding,) = target.encodings(site.spec, site.meaning)
        params = params_of(site.spec, encoding, _TARGET).with_lengths(plan_context.lengths)
        return dataclasses.replace(
            found,
            mask=site.meaning.kind,
            status="fused",
            op=attended.node.op_type,
            domain=target.INFO.domain,
            scale=None if site.spec.scale_values else attended.emitted.scale,
            mask_form=attended.form,
            kernel=None if self.is_paged else kernel_of_forecast(forecast(params, plan_context.device), plan_context.device),
            layout=attended.emitted.layouts,
            assumptions=named_in_order(*found.assumptions, *assumed),
        )
