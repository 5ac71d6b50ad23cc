"""The passes of the pipeline, each a function of one graph that counts its changes; `pipeline.PASSES` has their order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.containment import Subject, collecting, contained
from onnx_attnfuse.fusion import foreign, mixers, roundings
from onnx_attnfuse.fusion.enabling import APART, apply_enabling
from onnx_attnfuse.fusion.enabling.quirks import apart_from_norms, with_flat_indices
from onnx_attnfuse.fusion.enabling.readable import REWRITES
from onnx_attnfuse.fusion.enabling.rule import EnablingRule
from onnx_attnfuse.fusion.enabling.standalone_rotary import fuse_rotary, widen_caches
from onnx_attnfuse.fusion.pass_context import PassContext, Run
from onnx_attnfuse.fusion.pattern_rewrites.rewrites import apply_rules, write_formulas, write_operators, write_windows
from onnx_attnfuse.fusion.plan_policy import needs_all_kernels
from onnx_attnfuse.fusion.report_site import as_asked, nodes_by_role, roundings_of
from onnx_attnfuse.fusion.site import SiteFuser
from onnx_attnfuse.graph import arguments, sweep
from onnx_attnfuse.graph.constants import all_nodes
from onnx_attnfuse.graph.edit import Snapshot
from onnx_attnfuse.graph.fixed_sizes import input_sizes
from onnx_attnfuse.graph.folding import fold
from onnx_attnfuse.graph.ops import CONTRIB, is_attention
from onnx_attnfuse.graph.order import is_sorted
from onnx_attnfuse.graph.quantised_operators import decompose_quantised as decompose_operators
from onnx_attnfuse.graph.sweep import sweep_unused
from onnx_attnfuse.graph.tensors import bodies
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.ort_settings import switches_for
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.report.lines import log_site
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.targets import packed

_MAY_BEGIN = frozenset(["Exp", "LogSoftmax", "Softmax"])
"""Operators that attention weights are made by."""
FUSING = "fusing the attentions of a graph"
_MOST_STEPS = 20_000_000
"""Nodes times attentions up to which a graph that broke is gone through again, attention by attention."""


def drop_needless(graph: PassContext) -> int:
    """Removes nodes that give their only input, and unused ones, of a graph with attention, which then has fewer forms."""
    if not any(node.op_type in _MAY_BEGIN or is_attention(node) for node in graph.scope.graph):
        return 0
    return sweep.drop_inner_copies(graph.scope.graph) + sweep_unused(tuple(graph.scope.graph))


def embed_arguments(run: Run) -> int:
    """Gives functions the constants that all calls pass to them, in a model with attention."""
    if not any(node.op_type in _MAY_BEGIN or is_attention(node) for part in bodies(run.model) for node in all_nodes(part)):
        return 0
    return arguments.embed_arguments(run.model)


def decompose_foreign(graph: PassContext) -> int:
    """Spells out fused operators that the execution provider is not known to run; they are planned anew then."""
    run = graph.run
    done = foreign.decompose_foreign(graph.graph_context(), run.plan_context)
    run.decomposed += done
    return sum(done.values())


def decompose_quantised(graph: PassContext) -> int:
    """Spells out the operators on quantised numbers that an attention is made of, in the main graph, to be put back."""
    if graph.scope.graph is not graph.run.model.graph:
        return 0
    graph.quantised = decompose_operators(graph.scope.graph, graph.scope.facts, graph.graph_context().builder)
    return len(graph.quantised.operators)


def put_quantised_back(graph: PassContext) -> int:
    """Puts the operators on quantised numbers back that no fused attention has taken the place of."""
    return graph.quantised.put_back(graph.graph_context().builder)


def apply_patterns(graph: PassContext) -> int:
    """Rewrites matches of patterns into plain attention."""
    rewriter = graph.pattern_rewriter()
    applied = apply_rules(rewriter)
    write_operators(rewriter)
    write_windows(rewriter)
    write_formulas(rewriter, graph.run.trace)
    graph.patterns = rewriter
    return applied + len(rewriter.done) + len(rewriter.needless)


def widen_rotary_caches(graph: PassContext) -> int:
    """Gives every RotaryEmbedding caches for the whole batch."""
    widened = widen_caches(graph.graph_context())
    graph.run.widened += widened
    return len(widened)


def find_attention(graph: PassContext) -> int:
    """Finds and reads the attentions, unless nothing has changed since that was done; changes nothing."""
    run = graph.run
    if graph.searched != run.version:
        graph.candidates, names = [], graph.quantised.names
        graph.candidates, graph.searched = graph.found(), run.version
        if not graph.roles:
            graph.roles = {label(item.node): nodes_by_role(item, graph.names) for item in graph.candidates}
            graph.roundings = {label(item.node): roundings_of(item, names) for item in graph.candidates}
    return 0


def leave_roundings_out(graph: PassContext) -> int:
    """Takes the roundings inside of attentions out, where that is asked for."""
    if not graph.run.options.dequantise_attention:
        return 0
    graph.left_out = roundings.leave_out(graph.candidates, graph.scope.facts)
    return len(graph.left_out)


def move_roundings(graph: PassContext) -> int:
    """Moves roundings of operands to where the execution provider wants them, bit for bit the same."""
    provider = graph.run.plan_context.device.provider
    if provider.unfused_form is not None and provider.unfused_form.rounds_products:
        return len(roundings.move_roundings(graph.candidates, graph.graph_context(), "views first"))
    if "roundings-first" not in provider.pays:
        return 0
    readable = [item for item in graph.candidates if item.spec is not None]
    graph.moved = roundings.move_roundings(readable, graph.graph_context(), "roundings first")
    return len(graph.moved)


def put_roundings_back(graph: PassContext) -> int:
    """Puts the roundings of attentions back, and to where they were, that were not fused."""
    sites = [] if graph.fused is None else graph.fused[1]
    done, builder = {site.name for site in sites if site.is_rewritten}, graph.graph_context().builder
    put = sum(item.finish(builder, useful=item.site in done) for item in reversed(graph.moved))
    put += roundings.restore_unused(graph.left_out, sites)
    if put:
        graph.scope.graph.sort()
    return put


def normalize_scores(graph: PassContext) -> int:
    """Rewrites attentions that could not be read, and keeps that where they can be read then."""
    run, scope, context, count = graph.run, graph.scope, graph.graph_context(), 0
    unread = [item.node for item in graph.candidates if item.softmax is not None and item.read is None]
    for node, rewrite in itertools.product(unread, REWRITES):
        found = graph.read_at(node)
        if found is None or found.softmax is None or found.read is not None:
            continue
        first = found.softmax.scores.producer()
        with context.rewrite(first, Subject("reading an attention in normal form"), label(node)) as edit:
            change = rewrite(found.softmax, context.builder)
            if change is None:
                continue
            before = Snapshot(scope.graph)
            edit.replace(change.results, change.frontier, label(node))
            scope.graph.sort()
            if graph.kind_of(node) is not None:
                run.replaced = {**run.replaced, **dict(change.results)}
                run.enabled[change.described("attentions read in normal form")] += 1
                count += 1
            else:
                before.restore()
    return count


def enable(rules: Sequence[EnablingRule], graph: PassContext) -> int:
    """Rewrites the nodes around attentions, where there are some."""
    if not graph.candidates and not graph.shared.candidates:
        return 0
    run = graph.run
    known = [rule for rule in rules if run.runtime is None or rule.since <= run.runtime]
    if graph.shared.candidates or any(item.spec is not None and item.spec.cache is not None for item in graph.candidates):
        known = [rule for rule in known if rule.with_cache]
    replaced = dict(run.replaced)  # the pass before this one keeps its own, to be put back
    done = apply_enabling(known, graph.graph_context(), run.plan_context.device.provider, replaced)
    run.replaced = replaced
    run.enabled += done
    return sum(done.values())


def keep_biases_apart(graph: PassContext) -> int:
    """Keeps products and biases apart that ONNX Runtime would make slower operators of."""
    run = graph.run
    return enable(APART[run.options.cuda_graph or not input_sizes(run.model)], graph)


def draw(graph: PassContext) -> int:
    """Draws the attentions as they are, where pictures are wanted; changes nothing."""
    graph.run.album.before(graph.candidates, graph.scope)
    return 0


def pack_rows(graph: PassContext) -> int:
    """Removes padding around the attentions, which stay as they are, where that pays and is equal, or asked for.

    Elsewhere that is for a fixed number of rows, where PackedMultiHeadAttention does not take all attentions.
    """
    run, asked = graph.run, graph.run.options.target == packed.NAME
    is_main, is_shared = graph.scope.graph is run.model.graph, graph.shared.decoder is not None
    pays, room = "packed-rows" in run.plan_context.device.provider.pays, run.options.packed_tokens
    if run.plan_context.target != ("auto" if pays else packed.NAME):
        return 0
    from onnx_attnfuse.fusion.packing.packer import takes_all
    from onnx_attnfuse.fusion.packing.rows import pack_rows as pack

    if not pays and (room is None or takes_all(graph.new_site_fuser(), graph.candidates, run.plan_context, room)):
        return 0
    run.plan_context = dataclasses.replace(run.plan_context, target="auto")
    if not is_main or is_shared or run.options.dequantise_attention or not graph.candidates:
        return 0
    fuser = graph.new_site_fuser()
    count, notes = pack(fuser, graph.candidates, run.plan_context, asked=asked, room=room)
    run.notes += notes
    if count:
        graph.scope.graph.sort()
        graph.candidates = graph.found()
    return count


def pack_attention(graph: PassContext) -> int:
    """Packs attentions, where that is asked for."""
    run = graph.run
    if run.plan_context.target != packed.NAME:
        return 0
    from onnx_attnfuse.fusion.packing.packer import pack

    run.options.progress("packing", len(run.sites), run.total)
    fuser = graph.new_site_fuser()
    found, notes = pack(fuser, graph.candidates, run.plan_context, run.options.packed_tokens)
    run.notes += notes
    return _finished(graph, fuser, found)


def fuse_attention(graph: PassContext) -> int:
    """Fuses the attentions, all at once; where the graph breaks, again with each by itself.

    Raises:
        Refused: The graph broke, and is too large for another attempt.
    """
    run, counted = graph.run, graph.run.verifier.differing
    if run.plan_context.target == packed.NAME:
        return 0
    count = 0
    with collecting() as met, contained(Subject(FUSING), graph.scope.path, graph.to_last()) as attempt:
        count = _fused(graph, alone=False)
    if attempt.reason is not None and len(graph.candidates) * len(graph.scope.graph) <= _MOST_STEPS:
        run.verifier.differing = counted
        return _fused(graph, alone=True)
    met.tell()
    if attempt.reason is not None:
        raise Refused(attempt.reason.code, attempt.reason.message, attempt.reason.node)
    return count


def _fused(graph: PassContext, *, alone: bool) -> int:
    """Fuses attentions; `alone`: each is undone by itself where the graph breaks by it."""
    run, fuser, found = graph.run, graph.new_site_fuser(), list[SiteReport]()
    for candidate in graph.candidates:
        run.options.progress("fusing", len(run.sites) + len(found), run.total)
        found.append(_fused_alone(graph, fuser, candidate) if alone else fuser.fuse(candidate, run.plan_context))
    return _finished(graph, fuser, found)


def _fused_alone(graph: PassContext, fuser: SiteFuser, candidate: Candidate) -> SiteReport:
    before, replaced, unsorted = Snapshot(graph.scope.graph), dict(fuser.replaced), fuser.unsorted
    name = label(candidate.node)
    with contained(Subject("fusing an attention"), name, before.restore) as attempt:
        found = fuser.fuse(candidate, graph.run.plan_context)
        graph.scope.graph.sort()
        return found
    assert attempt.reason is not None
    fuser.replaced, fuser.unsorted = replaced, unsorted
    return SiteReport(name, graph.scope.path, "skipped", reasons=(attempt.reason,))


def _finished(graph: PassContext, fuser: SiteFuser, found: list[SiteReport]) -> int:
    """Records the fused attentions; returns the number of attentions tried, each of which may have changed something."""
    if fuser.unsorted:
        graph.scope.graph.sort()
    graph.fused, graph.run.replaced = (fuser, graph.shared.joined(found)), fuser.replaced
    return len(found)


def put_patterns_back(graph: PassContext) -> int:
    """Puts back rewrites of patterns that no fused operator needed."""
    if graph.fused is None:
        return 0
    fuser, found = graph.fused
    found = [as_asked(site, graph.run.plan_context.target) for site in found]
    graph.fused = fuser, graph.patterns.finish(found, fuser.replaced)
    return len(graph.patterns.done)


def tell_sites(graph: PassContext) -> int:
    """Reports the attentions; changes nothing."""
    run, found, reason = graph.run, [] if graph.fused is None else graph.fused[1], graph.failure
    if graph.fused is None and reason is not None:
        left = [SiteReport(label(item.node), graph.scope.path, "skipped", reasons=(reason,)) for item in graph.candidates]
        found = graph.shared.joined(left)
    found = [
        dataclasses.replace(site, nodes=graph.roles.get(site.name, ()), roundings=graph.roundings.get(site.name, ()))
        for site in found
    ]
    run.sites += found
    run.pictures += run.album.pictures([*graph.shared.candidates, *graph.candidates], len(found))
    for site in found:
        log_site(site)
    run.notes += graph.patterns.notes(found)
    return 0


def fuse_mixers(graph: PassContext) -> int:
    """Fuses and reports the sequence mixers that are no softmax attention; those in the body of a loop belong to the loop."""
    run = graph.run
    found = mixers.fuse_mixers(graph.graph_context(), run.plan_context.device.provider, run.runtime)
    run.mixers += found
    return sum(item.operator is not None for item in found)


def fuse_standalone_rotary(graph: PassContext) -> int:
    """Fuses the remaining rotary embeddings, where there is a kernel for them."""
    if not graph.run.plan_context.device.provider.rotates:
        return 0
    context = graph.site_fuser().graph
    fused = sum(fuse_rotary(candidate.spec, context) for candidate in graph.candidates if candidate.spec is not None)
    if fused:
        graph.scope.graph.sort()
    return fused


def fold_weights(graph: PassContext) -> int:
    """Makes constants of weights that fusing has rearranged."""
    builder = graph.site_fuser().graph.builder
    return fold(builder.rearranged, builder, "attnfuse/weight")


def sink_into_branches(graph: PassContext) -> int:
    """Moves nodes that only some batches need into their branches."""
    return graph.site_fuser().guards.sink_into_branches()


def sort_nodes(graph: PassContext) -> int:
    """Sorts the nodes, where one comes before its inputs."""
    if is_sorted(graph.scope.graph):
        return 0
    graph.scope.graph.sort()
    return 1


def avoid_quirks(graph: PassContext) -> int:
    """Rewrites nodes that the execution provider computes wrong as they are."""
    provider = graph.run.plan_context.device.provider
    rules = [(with_flat_indices, provider.gathers_flat), (apart_from_norms, provider.merges_into_norms)]
    wanted = [rule for rule, is_wanted in rules if is_wanted]
    return sum(apply_enabling(wanted, graph.graph_context(), provider, {}).values())


def switch_kernels(run: Run) -> int:
    """Plans with the kernels that the policy leaves; where operators are there that may need the others, all are left."""
    device = run.plan_context.device
    switched = dataclasses.replace(device, switches=switches_for(run.policy, device))
    existing = [
        (item.node, part.scope) for part in run.graphs for item in part.candidates if item.softmax is None and item.spec is None
    ]
    needy = [node for node, scope in existing if needs_all_kernels(params_of_node(node, scope.facts), switched)]
    if needy:
        run.notes.append(f"no kernel is switched off: existing operators may need it, for example '{needy[0].name}'")
        switched = dataclasses.replace(device, switches=switches_for(run.policy, device, may_switch_off=False))
    run.plan_context = dataclasses.replace(run.plan_context, device=switched)
    return 0


def order_inputs(run: Run) -> int:
    """Puts inputs that nobody reads after the others, for an execution provider that mixes inputs up which follow one."""
    model, provider = run.model.graph, run.plan_context.device.provider
    unread = [value for value in model.inputs if not value.uses() and not value.is_graph_output()]
    wanted = sorted(model.inputs, key=unread.__contains__)
    if not provider.mixes_up_inputs or wanted == list(model.inputs):
        return 0
    model.inputs[:] = wanted
    names = ", ".join(f"{value.name}" for value in unread)
    run.notes.append(f"unused inputs moved to the end, because {provider.name} mixes up inputs otherwise: {names}")
    return 1


def finish_imports(run: Run) -> int:
    """Imports com.microsoft where it is used, and lowers an opset that was raised for nothing."""
    parts = tuple(bodies(run.model))
    for part in parts:
        if any(node.domain == CONTRIB for node in all_nodes(part)):
            part.opset_imports.setdefault(CONTRIB, 1)
    nodes = itertools.chain.from_iterable(map(all_nodes, parts))
    if run.opset.raised_from and not any(node.op_type == "Attention" and node.domain == "" for node in nodes):
        run.opset.restore()
    return 0
