"""Decoders whose cache becomes one buffer, as `cache="shared"` asks for: options, and passes before and after it does."""

from __future__ import annotations

import dataclasses
from typing import get_args

from onnx_attnfuse.errors import OptionError, VerificationError
from onnx_attnfuse.fusion import capturing
from onnx_attnfuse.fusion.pass_context import PassContext, Run
from onnx_attnfuse.graph.build import builder_for
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.device import resolve, runtime_version
from onnx_attnfuse.kernels.operators import group_query_attention, info_of
from onnx_attnfuse.options import CachePolicy, Options
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewriting import GraphContext


def check_options(options: Options) -> None:
    """Checks that the execution provider takes a cache in one buffer, where that is asked for, and options that need one.

    Raises:
        OptionError: It is not known to; or the most positions are given for another cache, or are none.
    """
    if options.cache not in get_args(CachePolicy):
        raise OptionError(f"cache is {options.cache!r}; choose {' or '.join(get_args(CachePolicy))}")
    if options.cache != "shared":
        for name in ("context_length", "past_length"):
            if getattr(options, name) not in (None, False):
                raise OptionError(f"{name} needs a cache in one buffer; choose cache 'shared', or leave it out")
    if options.past_length and (options.cuda_graph or options.kv_cache != "same"):
        raise OptionError("past_length cannot be combined with cuda_graph or kv_cache, which want a mask; leave it or them out")
    if options.context_length is not None and options.context_length < 1:
        raise OptionError(f"context_length is {options.context_length}; choose a number from 1 on")
    if options.cache == "shared" and not resolve(options.ep, options.arch).provider.shares_cache:
        others = " or ".join(item.name for item in providers.every() if item.shares_cache)
        known = f"GroupQueryAttention is not known to read a length for each entry on {options.ep}"
        raise OptionError(f"cache is 'shared', and {known}; choose --ep {others} with it")


def decompose_cached(run: Run) -> int:
    """Decomposes the operators of the main graph that append to a past: their parts may share a buffer.

    GroupQueryAttention stays: its past may be a buffer already.
    """
    if run.options.cache != "shared" or run.tried is not None:
        return 0
    from onnx_attnfuse.transforms.decompose.decompose import decompose_node

    scope, model = next(iter(scopes(run.model))), run.model
    found = [node for node in scope.graph if is_attention(node) and node.op_type != group_query_attention.INFO.name]
    cached = [node for node in found if (info := info_of(node)) is not None and info.first(node, "past") is not None]
    if cached:
        builder = builder_for(scope, all_names(model))
        graph = GraphContext(scope, model, builder, run.verifier)
        for node in cached:
            name = f"{node.domain or 'ai.onnx'}.{node.op_type}"
            run.decomposed_cached[name] += decompose_node(graph, node).status == "unfused"
    run.decomposed_cached = +run.decomposed_cached
    return run.decomposed_cached.total()


def take_with_past(run: Run) -> int:
    """Takes, of two merged decoders, the one with a past alone."""
    if run.options.cache != "shared" or run.tried is not None:
        return 0
    from onnx_attnfuse.fusion.shared_cache.decoder import with_past

    found = with_past(run.model)
    if found is None:
        return 0
    run.model, run.merged = found
    return 1


def lay_out(run: Run) -> int:
    """Takes the model with caches that lie as a buffer does, where its own lie otherwise."""
    if run.options.cache != "shared" or run.tried is not None or run.merged is not None:
        return 0
    from onnx_attnfuse.fusion.shared_cache.laid_out import laid_out

    laid = laid_out(run.model, run.readers)
    if laid is None:
        return 0
    run.model = laid
    return 1


def share_cache(graph: PassContext) -> int:
    """Makes the cache of a decoder one buffer, where that is asked for; its attentions are done with then."""
    run = graph.run
    if run.options.cache == "as-is":
        return 0
    from onnx_attnfuse.fusion.shared_cache.share import Sharing

    fuser = graph.new_site_fuser()
    length, is_quantised = run.options.context_length, run.options.kv_cache != "same"
    runtimes = [item for item in (run.runtime, runtime_version(None, providers.provider("cpu"))) if item]
    oldest = min(runtimes, default=None)
    found = Sharing(fuser.graph, fuser.context, run.plan_context, run.merged, length, is_quantised, oldest).share(
        graph.candidates
    )
    run.notes += [] if found.note is None else [found.note]
    graph.shared = found
    if found.decoder is None:
        return 0
    fold(fuser.graph.builder.rearranged, fuser.graph.builder, "attnfuse/weight")
    kept = {item.node for item in graph.candidates if item.node not in found.sites}
    graph.candidates = [item for item in graph.found() if item.node in kept]
    return len(found.sites)


def check(run: Run) -> int:
    """Judges a decoder whose cache is shared as the last pass has left it, where the whole model is to be judged.

    Raises:
        VerificationError: It differs.
    """
    if run.shared.check is None or run.verifier.level != "model":
        return 0
    try:
        verified = run.shared.check()
    except Refused as refused:
        raise VerificationError(f"the fused model differs: {refused.reason}; please report it with the model") from refused
    if verified is not None:
        run.notes.append(f"whole model verified in {verified.cases} loops, largest error {verified.max_abs_error:.1e}")
    return 0


def finish(run: Run) -> int:
    """Gives a decoder that is judged its tables in full, and tells its length by a number where that is asked for."""
    decoder, source = run.shared.decoder, run.shared.source
    if decoder is None or source is None:
        return 0
    if run.shared.tables is not None and run.options.context_length is not None:
        from onnx_attnfuse.fusion.shared_cache.positions import lengthen

        lengthen(run.model, run.shared.tables, run.options.context_length)
    mask = decoder.attention_mask
    if run.options.past_length and mask in {value.name for value in source.graph.inputs}:
        run.notes.append(f"'{mask}' gives the length of the cache, because the model has its own mask")
    elif run.options.past_length:
        from onnx_attnfuse.fusion.shared_cache.positions import with_past_length

        decoder = with_past_length(run.model, decoder)
        run.notes.append(f"'{decoder.past_length}' gives the length of the cache instead of '{mask}'")
    if run.options.cuda_graph:
        decoder = capturing.sized(decoder, run.model)
    run.graphs[0].shared = dataclasses.replace(run.shared, decoder=decoder)
    return 1
