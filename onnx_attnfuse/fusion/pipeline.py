"""The pipeline from a model to a fused model and its report: `PASSES` in order, each timed, contained and undone where it fails.

fusion = Fusion(options)
model, kind = fusion.read("model.onnx")
report = fusion.fuse(model)
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import onnx_ir as ir

from onnx_attnfuse.containment import Subject, collecting, contained, tell
from onnx_attnfuse.errors import OptionError, VerificationError
from onnx_attnfuse.fusion import capturing, dequantising, passes, quantising
from onnx_attnfuse.fusion.enabling import AFTER, BEFORE
from onnx_attnfuse.fusion.pass_context import Pass, PassContext, Run
from onnx_attnfuse.fusion.shared_cache.counted import lengthen
from onnx_attnfuse.fusion.shared_cache.laid_out import laid_out
from onnx_attnfuse.fusion.shared_cache.merged import with_past
from onnx_attnfuse.fusion.shared_cache.spelled import spell_out_cached
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.fixed_sizes import fold_sizes, input_sizes, unknown_sizes
from onnx_attnfuse.graph.scopes import count_ops, scopes
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.device import Device, resolve
from onnx_attnfuse.kernels.ort_settings import session_for
from onnx_attnfuse.language.matcher.near_miss import Trace
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import CachePolicy, Options
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.report.model import PatternReport, Report
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify.verifier import NOT_VERIFIED, Verifier

_FIND, _REWRITE = "find", "plan and rewrite"
_NO_ATTENTION = "no attention in the model could be read"
_PACKING_ROWS = "packing what stands around attentions"
_ROTARY = "replacing rotary embeddings"
_LAYING_OUT = Subject("laying the cache of a decoder out")
PASSES: tuple[Pass, ...] = (
    Pass("spelling out operators of other providers", passes.spell_out_foreign, _REWRITE),
    Pass("taking out what does nothing", passes.drop_needless, _FIND),
    Pass("applying patterns", passes.apply_patterns, "apply patterns"),
    Pass("spelling out operators on quantised numbers", passes.spell_out_quantised, _FIND),
    Pass("widening caches", passes.widen_rotary_caches, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("leaving roundings inside of attentions out", passes.leave_roundings_out, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("moving roundings", passes.move_roundings, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("reading scores in normal form", passes.normalize_scores, _FIND),
    Pass("preparing for fusions of ONNX Runtime", functools.partial(passes.enable, BEFORE), _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("switching kernels off", passes.switch_kernels, undo=None, once=True),
    Pass("drawing what is there", passes.draw, undo=None),
    Pass("sharing the buffer of the cache", passes.share_cache, _REWRITE),
    Pass(_PACKING_ROWS, passes.pack_rows, _REWRITE),
    Pass("packing the attentions of a graph", passes.pack_attention, _REWRITE),
    Pass(passes.FUSING, passes.fuse_attention, _REWRITE),
    Pass("putting patterns back", passes.put_patterns_back, _REWRITE, PassContext.to_origin),
    Pass("putting roundings back", passes.put_roundings_back, _REWRITE, None),
    Pass("putting operators on quantised numbers back", passes.put_quantised_back, _REWRITE, PassContext.to_origin),
    Pass("telling of sites", passes.tell_sites, _REWRITE, None),
    Pass("fusing other sequence mixers", passes.fuse_mixers, _REWRITE),
    Pass(_ROTARY, passes.fuse_standalone_rotary, _REWRITE),
    Pass("folding constants", passes.fold_weights, _REWRITE),
    Pass("preparing for fusions of ONNX Runtime", functools.partial(passes.enable, AFTER), _REWRITE),
    Pass("keeping biases apart from products", passes.keep_biases_apart, _REWRITE),
    Pass("moving what only some batches need", passes.sink_into_branches, _REWRITE),
    Pass("laying indices flat", passes.flatten_indices, _REWRITE),
    Pass("keeping normalizations apart", passes.keep_norms_apart, _REWRITE),
    Pass("sorting nodes", passes.sort_nodes, _REWRITE),
    Pass("putting inputs that nobody reads last", passes.order_inputs, undo=None, once=True),
    Pass("settling opset imports", passes.settle_imports, undo=None, once=True),
)
"""All that is done to a model, in order."""


class Fusion:
    """A run that is set up: patterns are loaded and options are checked."""

    def __init__(self, options: Options, *, keep_evidence: bool = True, doubts: bool = True) -> None:
        """Sets a run up.

        Args:
            options: The options.
            keep_evidence: Write down what differs.
            doubts: Verify what patterns do that are not built in, whatever the options say.

        Raises:
            MissingDependencyError: Verification was asked for and onnxruntime is absent.
            OptionError: An option has no such value.
        """
        if options.cache not in get_args(CachePolicy):
            raise OptionError(f"cache is {options.cache!r}; choose {' or '.join(get_args(CachePolicy))}")
        quantising.check_options(options)
        capturing.check_options(options)
        _check_shared_cache(options)
        self.options = options
        self.catalogue = load(options)
        self.verifier = Verifier(options, self.catalogue.operators.values(), keep_evidence=keep_evidence, doubts=doubts)

    def read(self, model: io.AnyModel) -> tuple[ir.Model, io.ModelKind]:
        """Reads a model; see `io.from_any`."""
        with self.verifier.timer.step("read"):
            return io.from_any(model)

    def fuse(self, model: ir.Model, *, trace: Trace | None = None, dtype: ir.DataType | None = None) -> Report:
        """Fuses what can be fused, in place; what fails costs its own place, and is told.

        Args:
            model: The model.
            trace: Takes the attempts of patterns that came nearest.
            dtype: Plan as if attention was computed in this type; what is built serves nobody then.

        Raises:
            ModelError: The model is to be captured, and an input does not say how many axes it has.
            OptionError: The model is to be captured, and sizes of its inputs are not told.
        """
        notes = () if self.options.cache == "shared" else tuple(_untaken(model, self.options))
        if self.options.cache != "shared" and capturing.fixes(model, self.options):
            capturing.fix(model, self.options)
        with collecting() as failures:
            for pack in self.catalogue.broken:
                tell(pack)
            report = self._reported(model, trace, dtype)
        failed = failures.all()
        return dataclasses.replace(report, failures=failed, notes=(*notes, *report.notes, *map(str, failed)))

    def _reported(self, model: ir.Model, trace: Trace | None, dtype: ir.DataType | None) -> Report:
        """Fuses a model, where its cache is to be one buffer brought into a form that such a buffer can be made from."""
        spelled = spell_out_cached(model, self.verifier) if self.options.cache == "shared" else Counter[str]()
        report = self._served(model, trace, dtype)
        words = ", ".join(f"{count} {op}" for op, count in sorted(spelled.items()))
        note = f"decomposed, so that their cache can be one buffer: {words}"
        return dataclasses.replace(report, notes=(*report.notes, note)) if spelled else report

    def _served(self, model: ir.Model, trace: Trace | None, dtype: ir.DataType | None) -> Report:
        """Fuses a model; of two merged decoders the one with a past alone, where that makes its cache one buffer."""
        found = with_past(model) if self.options.cache == "shared" else None
        note = None
        if found is not None:
            alone, merged = found
            run = Run(alone, self.options, self.catalogue, self.verifier, trace, dtype, merged)
            report, flag = _report(run), merged.branch.name
            if report.decoder is not None:
                model.graph = alone.graph
                note = f"merged decoder: kept the branch with a past and removed the input '{flag}'"
                return dataclasses.replace(report, notes=(*report.notes, note))
            note = f"merged decoder: the branch with a past was tried alone: {run.shared.note}"
        laid: ir.Model | None = None
        if self.options.cache == "shared" and found is None:
            with contained(_LAYING_OUT, model.graph.name or "main", None):
                laid = laid_out(model, self.catalogue.readers)
        if laid is not None:
            report = _report(Run(laid, self.options, self.catalogue, self.verifier, trace, dtype))
            if report.decoder is not None:
                model.graph = laid.graph
                what = "keys and values of each layer as (batch, heads, positions, channels), a mask as (batch, positions)"
                note = f"cache layout changed: {what}"
                return dataclasses.replace(report, notes=(*report.notes, note))
        report = _report(Run(model, self.options, self.catalogue, self.verifier, trace, dtype))
        return report if note is None else dataclasses.replace(report, notes=(*report.notes, note))


def _untaken(model: ir.Model, options: Options) -> Iterator[str]:
    """A line on dimensions that `--dim` or `--same` names and no input has; a shared cache gets dimensions of its own."""
    names = input_sizes(model)
    there = ", ".join(names) or "none"
    if unknown := unknown_sizes(model, options.dim):
        yield f"--dim {', '.join(unknown)} matches no dimension; the inputs have {there}"
    for same in options.same:
        if unmatched := [name for name in same.split("=") if not fnmatch.filter(names, name)]:
            yield f"--same {', '.join(unmatched)} matches no dimension; the inputs have {there}"


def _check_shared_cache(options: Options) -> None:
    """Checks that the execution provider takes a cache in one buffer, where that is asked for, and what goes with one alone.

    Raises:
        OptionError: It is not known to; or the most positions are told of another cache, or are none.
    """
    if options.context_length is not None and options.cache != "shared":
        raise OptionError("context_length needs a cache in one buffer; choose cache 'shared', or leave it out")
    if options.past_length and options.cache != "shared":
        raise OptionError("past_length needs a cache in one buffer; choose cache 'shared', or leave it out")
    if options.past_length and (options.cuda_graph or options.kv_cache != "same"):
        raise OptionError("past_length cannot be combined with cuda_graph or kv_cache, which want a mask; leave it or them out")
    if options.context_length is not None and options.context_length < 1:
        raise OptionError(f"context_length is {options.context_length}; choose a number from 1 on")
    if options.cache == "shared" and not resolve(options.ep, options.arch).provider.shares_cache:
        others = " or ".join(item.name for item in providers.every() if item.shares_cache)
        known = f"GroupQueryAttention is not known to read a length for each entry on {options.ep}"
        raise OptionError(f"cache is 'shared', and {known}; choose --ep {others} with it")


def _report(run: Run) -> Report:
    """Applies all passes, and tells."""
    start, before = time.perf_counter(), count_ops(run.model)
    _apply_all(run)
    _check_decoder(run)
    cache = quantising.quantise(run)
    dequantised = dequantising.told(run)
    if run.options.cuda_graph or (run.plan_context.device.provider.fixed_sizes and not input_sizes(run.model)):
        with run.verifier.timer.step(_REWRITE):
            if run.options.cache == "shared":  # the size of the buffer is one that the source has not
                capturing.fix(run.model, run.options)
            fold_sizes(run.model, run.options.assumed)
    decoder = _finished_decoder(run)
    if decoder is not None and run.options.cuda_graph:
        decoder = capturing.sized(decoder, run.model)
    seconds, ops_after = time.perf_counter() - start, count_ops(run.model)
    fused = any(site.status in {"fused", "already-fused"} for site in run.sites)
    device, session, capture = run.plan_context.device, None, None
    with contained(Subject("telling what was done")):
        run.notes += _around(run)
        session = session_for(device if fused else Device(device.ep, device.arch), has_if="If" in ops_after)
    with contained(Subject("telling what can be captured")):
        folded, known = run.options.cuda_graph, {part.scope.graph: part.scope.facts for part in run.graphs}
        stale = folded or cache is not None
        capture = capturing.told(run.model, device.provider, folded=folded, known=None if stale else known)
    return Report(
        sites=tuple(run.sites),
        mixers=tuple(run.mixers),
        seconds=seconds,
        ops_before=before,
        ops_after=ops_after,
        notes=tuple(run.notes),
        differing=run.verifier.differing,
        patterns=_patterns(run),
        policy=run.policy,
        session=session,
        capture=capture,
        steps=dict(run.verifier.timer.seconds),
        pictures=tuple(run.pictures),
        decoder=decoder,
        unshared=None if decoder is not None or run.options.cache == "as-is" else run.shared.note or _NO_ATTENTION,
        off_target=_off_target(run),
        kv_cache=cache,
        dequantised=dequantised,
    )


def _off_target(run: Run) -> int:
    """The number of attentions that are not the operator that the options name."""
    if run.options.target == "auto":
        return 0
    statuses = [site.status for site in run.sites]
    if run.plan_context.target == run.options.target:
        return statuses.count("skipped")
    return max(0, len(statuses) - statuses.count("not-attention") - run.changes[_PACKING_ROWS])


def _finished_decoder(run: Run) -> ServedDecoder | None:
    """The decoder once it is judged: its tables in full, its length told by a number where that is asked for."""
    decoder, source = run.shared.decoder, run.shared.source
    if run.shared.tables is not None and run.options.context_length is not None:
        lengthen(run.model, run.shared.tables, run.options.context_length)
    if decoder is None or source is None or not run.options.past_length:
        return decoder
    if decoder.attention_mask in {value.name for value in source.graph.inputs}:
        run.notes.append(f"'{decoder.attention_mask}' tells the length of the cache, because the model has its own mask")
        return decoder
    from onnx_attnfuse.fusion.shared_cache.past_length import told_by_number

    told = told_by_number(run.model, decoder)
    run.notes.append(f"'{told.past_length}' gives the length of the cache instead of '{decoder.attention_mask}'")
    return told


def _check_decoder(run: Run) -> None:
    """Judges a decoder whose cache is shared as the last pass has left it, where the whole model is to be judged.

    Raises:
        VerificationError: It differs.
    """
    if run.shared.check is None or run.verifier.level != "model":
        return
    try:
        verified = run.shared.check()
    except Refused as refused:
        raise VerificationError(f"the fused model differs: {refused.reason}; please report it with the model") from refused
    if verified is not None:
        run.notes.append(f"whole model verified in {verified.cases} loops, largest error {verified.max_abs_error:.1e}")


def _apply_all(run: Run) -> None:
    """Applies the passes: all up to one for the whole model to a graph, then to the next graph."""
    for once, stage in itertools.groupby(PASSES, key=lambda item: item.once):
        together = tuple(stage)
        for graph in run.graphs[:1] if once else run.graphs or _read(run):
            for item in together:
                _apply(item, graph)


def _read(run: Run) -> Iterator[PassContext]:
    """The graphs of the model, each read when its turn comes, as passes may have changed what surrounds or calls it."""
    pending = scopes(run.model, run.options.assumed)
    while True:
        with run.verifier.timer.step(_FIND):
            scope = next(pending, None)
            if scope is None:
                return
            run.graphs.append(PassContext(run, scope))
        yield run.graphs[-1]


def _apply(item: Pass, graph: PassContext) -> None:
    """Applies one pass; what fails is undone and told."""
    run = graph.run
    timed = contextlib.nullcontext() if item.step is None else run.verifier.timer.step(item.step)
    place = None if item.once else graph.scope.path
    with timed, contained(Subject(item.name), place, None if item.undo is None else item.undo(graph)) as attempt:
        changes = item.apply(graph)
        run.changes[item.name] += changes
        run.version += bool(changes)
    graph.failure = attempt.reason or graph.failure


def _patterns(run: Run) -> tuple[PatternReport, ...]:
    """The counts of every pattern that was tried."""
    entries = ((entry, run.statistics.counts.get(entry.name)) for entry in run.catalogue.entries)
    return tuple(
        PatternReport(entry.name, entry.kind, entry.owner, count.tries, count.hits, count.seconds)
        for entry, count in entries
        if count is not None
    )


def _around(run: Run) -> Iterator[str]:
    """Lines on what was done that belongs to no single site."""
    if run.options.verify is None and run.verifier.level == "none":
        yield NOT_VERIFIED
    if not run.verifier.doubts and any(not entry.is_built_in for entry in run.catalogue.entries):
        yield "rewrites by user patterns are not verified: onnxruntime is not installed"
    if believed := run.verifier.believed:
        count = f"{len(believed)} place{'s' * (len(believed) > 1)}"
        yield f"{count} rewritten by user patterns could not be verified, for example {believed[0]}"
    provider = run.plan_context.device.provider
    if provider.takes_if is False and (stay := count_ops(run.model)["If"]):
        remain = f"{stay} If node{'s' * (stay != 1)} remain{'s' * (stay == 1)}"
        yield f"{remain}, which {provider.name} does not support, or only at a cost"
    if provider.fixed_sizes and (open_sizes := input_sizes(run.model)):
        asked = " ".join(f"--dim {name}=N" for name in open_sizes)
        yield f"{run.plan_context.device.ep} takes models of fixed sizes only; {asked} fixes them"
    if run.spelled:
        words = ", ".join(f"{count} {op}" for op, count in sorted(run.spelled.items()))
        yield f"decomposed for {run.plan_context.device.ep}, which lacks them: {words}"
    if left := sum(node.graph is not None for node in run.widened):
        yield f"{left} RotaryEmbedding caches expanded to the whole batch, as ONNX Runtime requires"
    if turned := run.changes[_ROTARY]:
        yield f"{turned} rotary embeddings fused to RotaryEmbedding outside of attentions"
    if run.opset.raised_from is not None:
        yield f"opset raised from {run.opset.raised_from} to {run.opset.version}, which ai.onnx Attention needs"
    yield from (f"{count} {what}" for what, count in run.enabled.items())
