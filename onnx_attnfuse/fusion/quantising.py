"""Quantised caches, and attentions of quantised models without the roundings inside, as options ask for them: checks and reports.

Roundings are taken out in a pass (`roundings.py`), so that all later passes fuse and verify the site as attention in
floats. So each fused attention is exactly that without the roundings. Their effect is measured on the whole model.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import onnx_ir as ir

from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError, VerificationError
from onnx_attnfuse.fusion.pass_context import Run
from onnx_attnfuse.fusion.roundings import counted
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.options import CacheType, Options
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention
from onnx_attnfuse.verify.runtime import available


def check_options(options: Options) -> None:
    """Checks that a cache can be quantised with these options at all, if that is asked for.

    Raises:
        MissingDependencyError: onnxruntime is absent, which measures the scales.
        OptionError: An option has no such value, or contradicts another.
    """
    if options.kv_cache not in get_args(CacheType):
        raise OptionError(f"kv_cache is {options.kv_cache!r}; choose {' or '.join(get_args(CacheType))}")
    if options.kv_cache == "same":
        if options.calibrate is not None:
            raise OptionError(f"{options.calibrate} is for the scales of a quantised cache; add --kv-cache int8, or leave it out")
        return
    if options.cache != "shared":
        raise OptionError(f"kv_cache is {options.kv_cache!r}, which only a shared cache can be; add --cache shared")
    if options.calibrate is not None and not options.calibrate.is_file():
        raise OptionError(
            f"{options.calibrate} is not there; write one with numpy.savez, arrays by the names of the model's inputs"
        )
    if not available():
        remedy = "run pip install 'onnx-attnfuse[cpu]', or leave --kv-cache out"
        raise MissingDependencyError(f"scales of a quantised cache are measured with onnxruntime; {remedy}")


def quantise(run: Run) -> int:
    """Quantises the cache of the model, where that is asked for.

    Raises:
        OptionError: The file to calibrate with cannot be used.
    """
    options = run.options
    if options.kv_cache == "same":
        return 0
    from onnx_attnfuse.fusion.quantised_cache import quantise_cache

    options.progress("quantising the cache", len(run.sites), run.total)
    run.kv_cache, notes = quantise_cache(run.model, run.shared, options, run.plan_context.device, run.verifier)
    run.notes += notes
    if run.kv_cache is not None:
        shared = {site.name for site in run.shared.sites.values()}
        for place, site in enumerate(run.sites):
            if site.name in shared and site.op == INFO.name:  # no order of its kernels is known
                form = f"{site.mask_form}, {run.kv_cache.format} cache"
                run.sites[place] = dataclasses.replace(site, mask_form=form, kernel=None)
    return run.kv_cache is not None


def measure(run: Run) -> int:
    """Takes down the roundings that were left out, with their cost, also in the model's metadata.

    Raises:
        VerificationError: The whole model is to be judged, and differs by more than these roundings.
    """
    if run.source is None:
        return 0
    counts = [counted(graph.left_out, run.sites) for graph in run.graphs]
    sites, roundings = (sum(numbers) for numbers in zip(*counts, strict=True)) if counts else (0, 0)
    if not sites:
        return 0
    record = DequantisedAttention(sites, roundings)
    if run.shared.decoder is not None:  # it has other inputs than its source, so that the two cannot be compared
        run.notes.append(f"{roundings} quantizations inside {sites} attentions are dropped; the effect was not measured")
        run.dequantised = record
        return 0
    if run.verifier.level == "model":
        _check(run, run.source)
    run.dequantised = record = _measured(run, run.source, record)
    record.write(run.model)
    run.notes += record.lines()
    return 0


def _measured(run: Run, source: ir.Model, record: DequantisedAttention) -> DequantisedAttention:
    if run.verifier.level == "none":
        return record
    from onnx_attnfuse.verify.quantised.stated_error import measure_dequantised

    try:
        with run.verifier.timer.step("measure what roundings cost"):
            return measure_dequantised(source, run.model, record)
    except ModelError as error:
        run.notes.append(f"the effect of dropping quantizations could not be measured: {error}")
        return record


def _check(run: Run, source: ir.Model) -> None:
    from onnx_attnfuse.verify.quantised.stated_error import check_dequantised

    try:
        with run.verifier.timer.step("verify the whole model"):
            verdict = check_dequantised(source, run.model)
    except ModelError as error:
        run.notes.append(f"the whole model could not be verified without quantizations: {error}")
        return
    if verdict.undecided is not None:
        run.notes.append(f"the whole model could not be verified without quantizations: {verdict.undecided}")
    elif not verdict.equal:
        problem = f"the fused model differs by more than the dropped quantizations: {verdict.detail}"
        raise VerificationError(f"{problem}; please report it with the model")
    else:
        run.notes.append(f"whole model verified on {verdict.cases} inputs without roundings, error {verdict.max_abs_error:.1e}")
