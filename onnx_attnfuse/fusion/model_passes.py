"""Passes over the whole model as options ask for them: caches in one buffer, quantised ones, models that ONNX Runtime captures.

Attentions of quantised models are fused without the roundings inside where that is asked for: these are taken out in a pass
(`roundings.py`), so that all later passes fuse and verify the site as attention in floats. So each fused attention is exactly
that without the roundings. Their effect is measured on the whole model. For a capture sizes are fixed, and remaining blockers
reported or refused.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError, VerificationError
from onnx_attnfuse.fusion.foreign import decompose_nodes
from onnx_attnfuse.fusion.pass_context import PassContext, Run, Undo
from onnx_attnfuse.fusion.roundings import counted
from onnx_attnfuse.fusion.shared_cache.decoder import Merged, left, with_past
from onnx_attnfuse.graph import fixed_sizes
from onnx_attnfuse.graph.build import builder_for
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.fixed_sizes import fold_sizes, input_sizes, inputs_without_shape, unknown_sizes
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.capture import capture_blockers
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider
from onnx_attnfuse.kernels.operators import group_query_attention, info_of
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.kernels.support import supported
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import CaptureReport, Report
from onnx_attnfuse.serving.decoder import ServedDecoder, StepSizes
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention
from onnx_attnfuse.verify.runtime import judging


def decompose_cached(run: Run) -> int:
    """Decomposes the operators of the main graph that append to a past: their parts may share a buffer.

    GroupQueryAttention stays: its past may be a buffer already.
    """
    if run.options.cache == "as-is" or run.tried is not None:
        return 0
    scope, model = next(iter(scopes(run.model))), run.model
    found = [node for node in scope.graph if is_attention(node) and node.op_type != group_query_attention.INFO.name]
    cached = [node for node in found if (info := info_of(node)) is not None and info.first(node, "past") is not None]
    if cached:
        builder = builder_for(scope, all_names(model))
        run.decomposed_cached += decompose_nodes(GraphContext(scope, model, builder, run.verifier), cached)
    return run.decomposed_cached.total()


def take_with_past(run: Run) -> int:
    """Takes, of two merged decoders, the one with a past alone."""
    found = with_past(run.model) if run.options.cache != "as-is" and run.tried is None else None
    if found is None:
        return 0
    run.model, run.merged = found
    return 1


def lay_out(run: Run) -> int:
    """Takes the model with caches that lie as a buffer does, where its own lie otherwise."""
    if run.options.cache == "as-is" or run.tried is not None or run.merged is not None:
        return 0
    from onnx_attnfuse.fusion.shared_cache.laid_out import laid_out

    laid = laid_out(run.model, run.readers)
    if laid is None:
        return 0
    run.model = laid
    return 1


def take_one_entry(run: Run) -> int:
    """Takes the model for a batch of one entry where its cache is to be in pages: the tokens of many requests are one axis."""
    if run.options.cache != "paged" or run.tried is not None:
        return 0
    from onnx_attnfuse.fusion.shared_cache.paged import one_entry

    run.model = one_entry(run.model)
    return 1


def share_cache(graph: PassContext) -> int:
    """Makes the cache of a decoder one buffer, where that is asked for; its attentions are done with then."""
    run = graph.run
    if run.options.cache == "as-is":
        return 0
    is_paged = run.options.cache == "paged"
    if is_paged and run.tried is not None:  # with any batch, of which one entry alone could be in pages
        graph.shared = run.tried.shared
        return 0
    from onnx_attnfuse.fusion.shared_cache.share import Sharing

    undo = _undo_caches(graph)
    try:
        matrices = _derive_cache(graph)
    except Refused as refused:
        undo()
        graph.shared = left({item.node: refused.reason for item in graph.candidates if item.spec is not None})
        run.notes += [] if graph.shared.note is None else [graph.shared.note]
        return 0
    fuser = graph.new_site_fuser()
    oldest = min((version for version in (run.runtime, judging()) if version is not None), default=None)
    sharing = Sharing(
        fuser.graph,
        fuser.context,
        run.plan_context,
        merged=run.merged,
        context_length=run.options.context_length,
        is_quantised=run.options.kv_cache != "same",
        is_paged=is_paged,
        runtime=oldest,
        window_cache=run.options.window_cache,
    )
    found = sharing.share(graph.candidates)
    run.notes += [] if found.note is None else [found.note]
    if found.decoder is None and matrices is not None:
        undo()
    graph.shared = found
    if found.decoder is None:
        return 0
    fold([*(matrices or ()), *fuser.graph.builder.rearranged], fuser.graph.builder, "attnfuse/weight")
    kept = {item.node for item in graph.candidates if item.node not in found.sites}
    graph.candidates = [item for item in graph.found() if item.node in kept or not found.sites]
    return max(len(found.sites), 1)


def _undo_caches(graph: PassContext) -> Undo:
    """The undo of other caches: puts the graph and what is known of it back to what they are."""
    undo, facts, candidates, merged = graph.to_last(), graph.scope.facts, graph.candidates, graph.run.merged
    origins, decomposed = dict(facts.origins), graph.run.decomposed_cached

    def undo_all() -> None:
        undo()
        graph.run.decomposed_cached = decomposed
        facts.origins.clear()
        facts.origins.update(origins)
        graph.candidates, graph.run.merged = candidates, merged

    return undo_all


def _derive_cache(graph: PassContext) -> list[ir.Value] | None:
    """Gives attentions caches of keys and values where they have others; the weights made for that, None where they have none.

    Raises:
        Refused: They have others, which have to stay.
    """
    from onnx_attnfuse.fusion.shared_cache.derived import derive, other_caches

    run, scope, context = graph.run, graph.scope, graph.graph_context()
    specs = [item.spec for item in graph.candidates if item.spec is not None]
    others = other_caches(scope.graph, scope.facts, specs) if scope.graph is run.model.graph else []
    if not others:
        return None
    source, builder = run.model.clone(), context.builder
    names = {spec.name for spec in others}
    if operators := [item.node for item in graph.candidates if is_attention(item.node) and label(item.node) in names]:
        run.decomposed_cached = run.decomposed_cached + decompose_nodes(context, operators)
        graph.candidates = graph.found()
        specs = [item.spec for item in graph.candidates if item.spec is not None]
    wide_heads = supported(INFO.key, run.plan_context.device.provider).wide_heads
    own = derive(scope.graph, builder, specs, wide_heads=wide_heads)
    run.merged = Merged(source, None, own) if run.merged is None else dataclasses.replace(run.merged, own=own)
    graph.candidates = graph.found()
    return builder.rearranged


def check(run: Run) -> int:
    """Judges a decoder whose cache is shared as the last pass has left it, where the whole model is to be judged, or has pages.

    Raises:
        VerificationError: It differs.
    """
    has_pages = run.shared.decoder is not None and run.shared.decoder.pages is not None
    if run.shared.check is None or not (run.verifier.level == "model" or has_pages):
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
        decoder = sized(decoder, run.model)
    run.graphs[0].shared = dataclasses.replace(run.shared, decoder=decoder)
    return 1


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
    if run.verifier.level != "none":
        from onnx_attnfuse.verify.quantised.stated_error import measure_dequantised

        try:
            with run.verifier.timer.step("measure what roundings cost"):
                record = measure_dequantised(run.source, run.model, record)
        except ModelError as error:
            run.notes.append(f"the effect of dropping quantizations could not be measured: {error}")
    run.dequantised = record
    record.write(run.model)
    run.notes += record.lines()
    return 0


def _check(run: Run, source: ir.Model) -> None:
    from onnx_attnfuse.verify.quantised.stated_error import check_dequantised
    from onnx_attnfuse.verify.verdict import undecided

    try:
        with run.verifier.timer.step("verify the whole model"):
            verdict = check_dequantised(source, run.model)
    except ModelError as error:
        verdict = undecided(str(error))
    if verdict.undecided is not None:
        run.notes.append(f"the whole model could not be verified without quantizations: {verdict.undecided}")
    elif not verdict.equal:
        problem = f"the fused model differs by more than the dropped quantizations: {verdict.detail}"
        raise VerificationError(f"{problem}; please report it with the model")
    else:
        run.notes.append(f"whole model verified on {verdict.cases} inputs without roundings, error {verdict.max_abs_error:.1e}")


def fixes(model: ir.Model, options: Options) -> bool:
    """Whether a model's sizes are to be fixed: for a capture, or as the provider takes numbers only and all are given."""
    if options.cuda_graph:
        return True
    names = set(input_sizes(model))
    are_given = bool(names) and names <= options.dim.keys() and not inputs_without_shape(model)
    return are_given and resolve(options.ep, options.arch).provider.fixed_sizes


def fix(model: ir.Model, options: Options) -> None:
    """Fixes the sizes of a model's inputs, in place.

    Raises:
        ModelError: An input does not say how many axes it has.
        OptionError: Sizes are not given, or given for nothing.
    """
    names = input_sizes(model)
    if missing := [name for name in names if name not in options.dim]:
        asked = " ".join(f"--dim {name}=N" for name in missing)
        raise OptionError(f"cuda_graph needs numbers for the sizes {', '.join(map(repr, missing))}; add {asked}")
    fixed_sizes.fix_sizes(model, options.dim, options.assumed)


def sized(decoder: ServedDecoder, model: ir.Model) -> ServedDecoder:
    """A decoder with the sizes that its model has been fixed to."""
    shapes = {value.name: value.shape or ir.Shape(()) for value in model.graph.inputs}
    batch, new = (shapes[decoder.input_ids or decoder.inputs_embeds or ""][axis] for axis in (0, 1))
    found = (batch, new, shapes[decoder.attention_mask][1], shapes[decoder.past_keys[0]][2])
    return dataclasses.replace(decoder, sizes=StepSizes(*(size for size in found if isinstance(size, int))))


def fix_sizes(run: Run) -> int:
    """Fixes sizes where that is asked for; a shared cache gets dimensions of its own, so that its sizes are fixed later."""
    if run.options.cache != "as-is":
        return 0
    run.notes += _untaken(run.model, run.options)
    if not fixes(run.model, run.options):
        return 0
    fix(run.model, run.options)
    return 1


def _untaken(model: ir.Model, options: Options) -> Iterator[str]:
    """A line on dimensions that `--dim` or `--same` names and no input has."""
    names = input_sizes(model)
    there = ", ".join(names) or "none"
    if unknown := unknown_sizes(model, options.dim):
        yield f"--dim {', '.join(unknown)} matches no dimension; the inputs have {there}"
    for same in options.same:
        if unmatched := [name for name in same.split("=") if not fnmatch.filter(names, name)]:
            yield f"--same {', '.join(unmatched)} matches no dimension; the inputs have {there}"


def fold_fixed_sizes(run: Run) -> int:
    """Makes constants of values that follow from fixed sizes."""
    options, provider = run.options, run.plan_context.device.provider
    if not (options.cuda_graph or (provider.fixed_sizes and not input_sizes(run.model))):
        return 0
    if options.cache == "shared":
        fix(run.model, options)
    return fold_sizes(run.model, options.assumed)


def tell_capture(run: Run) -> int:
    """Takes down whether the model can be captured; changes nothing."""
    folded, known = run.options.cuda_graph, {part.scope.graph: part.scope.facts for part in run.graphs}
    stale = folded or run.kv_cache is not None
    run.capture = report_capture(run.model, run.plan_context.device.provider, folded=folded, known=None if stale else known)
    return 0


def report_capture(
    model: ir.Model, provider: ExecutionProvider, *, folded: bool, known: Mapping[ir.Graph, Facts] | None = None
) -> CaptureReport | None:
    """Whether a model can be captured, None where the execution provider captures none; arguments are those of the search."""
    capture = provider.capture
    if capture is None:
        return None
    unknown = (Reason("open-size", f"the input '{name}' has no shape") for name in inputs_without_shape(model))
    blockers = (*unknown, *capture_blockers(model, capture, folded=folded, known=known))
    return CaptureReport(capture.name, not blockers, input_sizes(model), blockers)


def refuse_uncaptured(report: Report, options: Options) -> None:
    """Refuses a model that is to be captured and cannot be.

    Raises:
        ModelError: Something prevents it, or it is not known.
    """
    if not options.cuda_graph or (report.capture is not None and report.capture.possible):
        return
    why = "it is not known whether it can be" if report.capture is None else str(report.capture.blockers[0])
    raise ModelError(f"the model cannot be captured in a CUDA graph: {why}; leave --cuda-graph out, or change that in its source")
