"""The pipeline from a model to a fused model and its report: `PASSES` in order, each timed, contained and undone where it fails.

fusion = Fusion(options)
model, kind = fusion.read("model.onnx")
report = fusion.fuse(model)

Forecasts make nothing of a model: for other devices, other types, and chosen lengths.

report = forecast(model, ep="cuda", arch="sm80", dtype="float16", length=512)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import time
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length as length_of
from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.containment import Failure, Subject, collecting, contained, tell
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion import model_passes, passes
from onnx_attnfuse.fusion.enabling import AFTER, BEFORE
from onnx_attnfuse.fusion.model_options import check_options
from onnx_attnfuse.fusion.pass_context import ModelPass, Pass, PassContext, Run
from onnx_attnfuse.graph import faults, io, sizes
from onnx_attnfuse.graph.fixed_sizes import input_sizes
from onnx_attnfuse.graph.scopes import count_ops, scopes
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.ort_settings import session_for
from onnx_attnfuse.language.matcher.match_state import Trace
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import PatternReport, Report
from onnx_attnfuse.verify.verifier import NOT_VERIFIED, Verifier

LAYING_OUT, ROTARY = "laying the cache of a decoder out", "replacing rotary embeddings"
PACKING_ROWS = "packing nodes around attentions"
_PACKAGES = ("onnx-attnfuse", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu")
_NO_ATTENTION = "no attention in the model could be read"


def tell_what_was_done(run: Run) -> int:
    """Adds notes on changes that belong to no single site, and session settings; changes nothing."""
    run.notes += _around(run)
    device, fused = run.plan_context.device, any(site.status in {"fused", "already-fused"} for site in run.sites)
    run.session = session_for(device if fused else Device(device.ep, device.arch), has_if="If" in count_ops(run.model))
    return 0


def _around(run: Run) -> Iterator[str]:
    """Lines on changes that belong to no single site."""
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
    if run.decomposed:
        words = ", ".join(f"{count} {op}" for op, count in sorted(run.decomposed.items()))
        yield f"decomposed for {run.plan_context.device.ep}, which lacks them: {words}"
    if left := sum(node.graph is not None for node in run.widened):
        yield f"{left} RotaryEmbedding caches expanded to the whole batch, as ONNX Runtime requires"
    if turned := run.changes[ROTARY]:
        yield f"{turned} rotary embeddings fused to RotaryEmbedding outside of attentions"
    if run.opset.raised_from is not None:
        yield f"opset raised from {run.opset.raised_from} to {run.opset.version}, which ai.onnx Attention needs"
    yield from (f"{count} {what}" for what, count in run.enabled.items())
    yield from _reshaped(run)


def _reshaped(run: Run) -> Iterator[str]:
    """Lines on the form of a decoder that its cache was to be shared in."""
    if run.tried is not None and run.tried.merged is not None:
        yield f"merged decoder: the branch with a past was tried alone: {run.tried.shared.note}"
    if run.merged is not None and run.merged.branch is not None:
        yield f"merged decoder: kept the branch with a past and removed the input '{run.merged.branch.name}'"
    if run.merged is not None and run.merged.own is not None:
        yield "cache contents changed: keys and values of one size, in the place of what they are computed from"
    if run.changes[LAYING_OUT]:
        layout = "keys and values of each layer as (batch, heads, positions, channels), a mask as (batch, positions)"
        yield f"cache layout changed: {layout}"
    if run.decomposed_cached:
        words = ", ".join(f"{count} {op}" for op, count in sorted(run.decomposed_cached.items()))
        yield f"decomposed, so that their cache can be one buffer: {words}"


def report(run: Run, failures: tuple[Failure, ...]) -> Report:
    """The report on a run, once all passes are applied."""
    decoder, unshared = run.shared.decoder, run.shared.note or _NO_ATTENTION
    return Report(
        sites=tuple(run.sites),
        mixers=tuple(run.mixers),
        seconds=time.perf_counter() - run.start,
        device=run.plan_context.device.name,
        versions=dict(_versions()),
        options=run.options.given(),
        ops_before=run.ops_before,
        ops_after=count_ops(run.model),
        notes=(*run.notes, *map(str, failures)),
        failures=failures,
        differing=run.verifier.differing,
        patterns=_patterns(run),
        policy=run.policy,
        session=run.session,
        capture=run.capture,
        steps=dict(run.verifier.timer.seconds),
        pictures=tuple(run.pictures),
        decoder=decoder,
        unshared=None if decoder is not None or run.options.cache == "as-is" else unshared,
        off_target=_off_target(run),
        kv_cache=run.kv_cache,
        dequantised=run.dequantised,
    )


def _versions() -> Iterator[tuple[str, str]]:
    """The installed packages that a run uses, with versions."""
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


def _patterns(run: Run) -> tuple[PatternReport, ...]:
    """The counts of every pattern that was tried."""
    entries = ((entry, run.statistics.counts.get(entry.name)) for entry in run.catalogue.entries)
    return tuple(
        PatternReport(entry.name, entry.kind, entry.owner, count.tries, count.hits, count.seconds)
        for entry, count in entries
        if count is not None
    )


def _off_target(run: Run) -> int:
    """The number of attentions that are not the operator that the options name."""
    if run.options.target == "auto":
        return 0
    statuses = [site.status for site in run.sites]
    if run.plan_context.target == run.options.target:
        return statuses.count("skipped")
    return max(0, len(statuses) - statuses.count("not-attention") - run.changes[PACKING_ROWS])


_FIND, _REWRITE = "find", "plan and rewrite"
PASSES: tuple[Pass, ...] = (
    ModelPass("fixing sizes", model_passes.fix_sizes, must_succeed=True),
    ModelPass("giving functions their constants", passes.embed_arguments, _FIND),
    ModelPass("decomposing operators with a past", model_passes.decompose_cached, must_succeed=True),
    ModelPass("taking the decoder with a past of two", model_passes.take_with_past),
    ModelPass(LAYING_OUT, model_passes.lay_out),
    ModelPass("taking one entry of a batch", model_passes.take_one_entry),
    Pass("decomposing operators of other providers", passes.decompose_foreign, _REWRITE),
    Pass("removing no-op nodes", passes.drop_needless, _FIND),
    Pass("applying patterns", passes.apply_patterns, "apply patterns"),
    Pass("decomposing operators on quantised numbers", passes.decompose_quantised, _FIND),
    Pass("widening caches", passes.widen_rotary_caches, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("leaving roundings inside of attentions out", passes.leave_roundings_out, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("moving roundings", passes.move_roundings, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("reading scores in normal form", passes.normalize_scores, _FIND),
    Pass("preparing for fusions of ONNX Runtime", functools.partial(passes.enable, BEFORE), _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    ModelPass("switching kernels off", passes.switch_kernels),
    Pass("drawing sites", passes.draw, undo=None),
    Pass("sharing the buffer of the cache", model_passes.share_cache, _REWRITE),
    Pass(PACKING_ROWS, passes.pack_rows, _REWRITE),
    Pass("packing the attentions of a graph", passes.pack_attention, _REWRITE),
    Pass(passes.FUSING, passes.fuse_attention, _REWRITE),
    Pass("putting patterns back", passes.put_patterns_back, _REWRITE, PassContext.to_origin),
    Pass("putting roundings back", passes.put_roundings_back, _REWRITE, None),
    Pass("putting operators on quantised numbers back", passes.put_quantised_back, _REWRITE, PassContext.to_origin),
    Pass("telling of sites", passes.tell_sites, _REWRITE, None),
    Pass("fusing other sequence mixers", passes.fuse_mixers, _REWRITE),
    Pass(ROTARY, passes.fuse_standalone_rotary, _REWRITE),
    Pass("folding constants", passes.fold_weights, _REWRITE),
    Pass("preparing for fusions of ONNX Runtime", functools.partial(passes.enable, AFTER), _REWRITE),
    Pass("keeping biases apart from products", passes.keep_biases_apart, _REWRITE),
    Pass("moving what only some batches need", passes.sink_into_branches, _REWRITE),
    Pass("writing nodes that the provider computes wrong otherwise", passes.avoid_quirks, _REWRITE),
    Pass("sorting nodes", passes.sort_nodes, _REWRITE),
    ModelPass("moving unused inputs to the end", passes.order_inputs),
    ModelPass("finishing opset imports", passes.finish_imports),
    ModelPass("verifying the decoder", model_passes.check, must_succeed=True),
    ModelPass("quantising the cache", model_passes.quantise, must_succeed=True),
    ModelPass("measuring what roundings cost", model_passes.measure, must_succeed=True),
    ModelPass("folding fixed sizes", model_passes.fold_fixed_sizes, _REWRITE, must_succeed=True),
    ModelPass("finishing the decoder", model_passes.finish, must_succeed=True),
    ModelPass("completing the report", tell_what_was_done),
    ModelPass("telling what can be captured", model_passes.tell_capture),
)
"""All that is done to a model, in order."""


class Fusion:
    """A run that is set up: patterns are loaded and options are checked."""

    def __init__(self, options: Options, *, keep_evidence: bool = True, doubts: bool = True) -> None:
        """Sets a run up.

        Args:
            options: The options.
            keep_evidence: Write down differences.
            doubts: Verify rewrites of patterns that are not built in, whatever the options say.

        Raises:
            MissingDependencyError: Verification was asked for and onnxruntime is absent.
            OptionError: An option has no such value.
        """
        check_options(options)
        self.options = options
        self.catalogue = load(options)
        self.verifier = Verifier(options, self.catalogue.operators.values(), keep_evidence=keep_evidence, doubts=doubts)

    def read(self, model: io.AnyModel) -> tuple[ir.Model, io.ModelKind]:
        """Reads a model; see `io.from_any`."""
        with self.verifier.timer.step("read"):
            return io.from_any(model)

    @aside()
    def fuse(self, model: ir.Model, *, trace: Trace | None = None, dtype: ir.DataType | None = None) -> Report:
        """Fuses the model in place; a failure costs its own site, and is reported.

        Args:
            model: The model.
            trace: Takes the attempts of patterns that came nearest.
            dtype: Plan as if attention was computed in this type; the built nodes are of no use then.

        Raises:
            ModelError: The model is to be captured, and an input does not say how many axes it has.
            OptionError: The model is to be captured, and sizes of its inputs are not given.
            VerificationError: The whole model is to be judged, and differs.
        """
        fixed = self.options, self.catalogue, self.verifier, trace, dtype
        with collecting() as failures:
            for pack in self.catalogue.broken:
                tell(pack)
            run = _applied(Run(model, *fixed))
            if run.model is not model and run.shared.decoder is None:
                run = _applied(Run(model, *fixed, tried=run))
        model.graph = run.model.graph
        return report(run, failures.all())


def _applied(run: Run) -> Run:
    """The run, once all passes are applied: those on graphs all up to one on the model to a graph, then to the next graph."""
    for kind, stage in itertools.groupby(PASSES, key=type):
        together = tuple(stage)
        for subject in (run,) if kind is ModelPass else run.graphs or _read(run):
            for item in together:
                _apply(item, subject)
    return run


def _read(run: Run) -> Iterator[PassContext]:
    """The graphs of the model, each read when its turn comes, as passes may have changed its callers and surroundings."""
    run.take_model()
    pending = scopes(run.model, run.options.assumed)
    while True:
        with run.verifier.timer.step(_FIND):
            scope = next(pending, None)
            if scope is None:
                return
            faults.note_types(run.model, scope.graph, scope.facts.dtype)
            run.graphs.append(PassContext(run, scope))
        yield run.graphs[-1]


def _apply(item: Pass, subject: PassContext | Run) -> None:
    """Applies one pass; a failure is undone and reported."""
    run, place = (subject, None) if isinstance(subject, Run) else (subject.run, subject.scope.path)
    with contextlib.nullcontext() if item.step is None else run.verifier.timer.step(item.step):
        attempt = None if item.must_succeed else contained(Subject(item.name), place, item.undo and item.undo(subject))
        with attempt or contextlib.nullcontext():
            changes = item.apply(subject)
            run.changes[item.name] += changes
            run.version += bool(changes)
    subject.failure = (attempt and attempt.reason) or subject.failure


DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def forecast(
    model: io.AnyModel, options: Options | None = None, *, dtype: str | None = None, length: int | None = None, **choices: Any
) -> Report:
    """Which kernel ONNX Runtime will run for each attention, and why not a faster one.

    Args:
        model: As for `optimize`; it stays as it was.
        options: Choices; or give its fields by name. Nothing is verified.
        dtype: Element type to forecast for, `float32`, `float16` or `bfloat16`; the model's own by default.
        length: How many queries and keys there will be; `dim` counts before it.
        **choices: Fields of `Options`.

    Returns:
        A report as of `explain`.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An option has no such value.
    """
    options = dataclasses.replace(options or Options(), **choices, verify="none")
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; choose {', '.join(DTYPES)}")
    if length is not None and length < 1:
        raise OptionError(f"the length is {length}; choose one of 1 or more")
    loaded, _ = io.from_any(model)
    if length is not None:
        options = dataclasses.replace(options, dim={**dict.fromkeys(sequence_symbols(loaded), length), **options.dim})
    return Fusion(options, doubts=False).fuse(loaded, dtype=None if dtype is None else DTYPES[dtype])


def sequence_symbols(model: ir.Model) -> set[str]:
    """Symbolic sizes that are the number of queries or of keys of an attention, whatever they are called."""
    readers = load(Options()).readers
    dims: list[Dim] = []
    for scope in scopes(model):
        for candidate in find_candidates(scope, readers, keep_outputs=True):
            if candidate.spec is not None:
                dims += [length_of(candidate.spec.axes.i), length_of(candidate.spec.axes.j)]
            elif candidate.softmax is None:
                params = params_of_node(candidate.node, scope.facts)
                dims += [params.rows, params.columns] if isinstance(params, AttentionParams) else []
    return {name for dim in dims for name in sizes.symbols(dim) if dim == sizes.symbol(name)}
