"""The report on a run, with lines on all that belongs to no single site."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Iterator

from onnx_attnfuse.containment import Failure
from onnx_attnfuse.fusion.pass_context import Run
from onnx_attnfuse.graph.fixed_sizes import input_sizes
from onnx_attnfuse.graph.scopes import count_ops
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.ort_settings import session_for
from onnx_attnfuse.report.model import PatternReport, Report
from onnx_attnfuse.verify.verifier import NOT_VERIFIED

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
    if run.merged is not None:
        yield f"merged decoder: kept the branch with a past and removed the input '{run.merged.branch.name}'"
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
