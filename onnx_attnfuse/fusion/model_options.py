"""Checks of options that are for the whole model: caches in one buffer or in pages, quantised ones, captures."""

from __future__ import annotations

from typing import get_args

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.options import CachePolicy, CacheType, Options
from onnx_attnfuse.targets import packed
from onnx_attnfuse.verify.runtime import INSTALL, available


def check_options(options: Options) -> None:
    """Checks options that are for the whole model.

    Raises:
        MissingDependencyError: onnxruntime is absent, which measures the scales of a quantised cache.
        OptionError: An option has no such value, or contradicts another or the execution provider.
    """
    _check_cache(options)
    _check_quantised(options)
    _check_capture(options)


def _check_cache(options: Options) -> None:
    """Checks that the execution provider takes a cache in one buffer, where that is asked for, and options that need one.

    Raises:
        OptionError: It is not known to; or the most positions are given for another cache, or are none.
    """
    if options.cache not in get_args(CachePolicy):
        raise OptionError(f"cache is {options.cache!r}; choose {' or '.join(get_args(CachePolicy))}")
    if options.context_length is not None and options.cache == "as-is":
        raise OptionError("context_length needs a cache in one buffer; choose cache 'shared' or 'paged'")
    for name in ("past_length", "window_cache"):
        if getattr(options, name) and options.cache != "shared":
            raise OptionError(f"{name} needs a cache in one buffer; choose cache 'shared', or leave it out")
    if options.cuda_graph and options.cache == "paged":
        raise OptionError("cuda_graph needs fixed sizes, and a step over pages has any size; leave one of them out")
    if options.past_length and (options.cuda_graph or options.kv_cache != "same"):
        raise OptionError("past_length cannot be combined with cuda_graph or kv_cache, which need a mask; leave it or them out")
    if options.window_cache and (options.cuda_graph or options.kv_cache != "same"):
        raise OptionError("window_cache cannot be combined with cuda_graph or kv_cache; leave it or them out")
    if options.context_length is not None and options.context_length < 1:
        raise OptionError(f"context_length is {options.context_length}; choose a number from 1 on")
    if options.cache != "as-is" and not resolve(options.ep, options.arch).provider.shares_cache:
        others = " or ".join(item.name for item in providers.every() if item.shares_cache)
        known = f"GroupQueryAttention is not known to read a length for each entry on {options.ep}"
        raise OptionError(f"cache is {options.cache!r}, and {known}; choose --ep {others} with it")


def _check_quantised(options: Options) -> None:
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
        remedy = "write one with numpy.savez, arrays by the names of the model's inputs"
        raise OptionError(f"{options.calibrate} is not there; {remedy}")
    if not available():
        remedy = f"{INSTALL}, or leave --kv-cache out"
        raise MissingDependencyError(f"scales of a quantised cache are measured with onnxruntime; {remedy}")


def _check_capture(options: Options) -> None:
    """Checks that a model can be captured with these options at all, if that is asked for.

    Raises:
        OptionError: The execution provider captures no model, or another option prevents a capture.
    """
    is_packed = options.target == packed.NAME
    if options.packed_tokens is not None and not (options.cuda_graph and is_packed):
        problem = f"packed_tokens is given, which is for cuda_graph with target {packed.NAME!r}"
        raise OptionError(f"{problem}; add both or leave it out")
    if not options.cuda_graph:
        return
    ep = resolve(options.ep, options.arch).ep
    if providers.provider(ep).capture is None:
        others = " or ".join(item.name for item in providers.every() if item.capture is not None)
        raise OptionError(f"cuda_graph is asked for, and {ep} captures no model; choose --ep {others} with it")
    if options.padding == "guarded":
        raise OptionError("padding is 'guarded', a test at run time, which no CUDA graph has; leave it or cuda_graph out")
    if is_packed and options.packed_tokens is None:
        problem = f"target is {packed.NAME!r}, and a CUDA graph has a fixed number of rows"
        raise OptionError(f"{problem}; add --packed-tokens N, for the most tokens of a batch, or leave cuda_graph out")
