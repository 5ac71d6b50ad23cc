"""Quantised caches as the pipeline asks for them: options are checked, and the result is reported site by site."""

from __future__ import annotations

import dataclasses
from typing import get_args

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.fusion.pass_context import Run
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.options import CacheType, Options
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
    from onnx_attnfuse.fusion.quantised_cache.quantise import quantise_cache

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
