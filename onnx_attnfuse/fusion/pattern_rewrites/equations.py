"""Equations of patterns: formulas found in the graph, and replaced by their meaning."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import NewNodes, PatternRewriter
from onnx_attnfuse.graph.uses import label, producer_of, viewers
from onnx_attnfuse.language.matcher.match_state import Match, Trace
from onnx_attnfuse.language.matcher.matcher import Matcher
from onnx_attnfuse.language.matcher.replacement import write
from onnx_attnfuse.reasons import Refused

_LOOKING = Subject("looking for patterns")


def find_formulas(rewriter: PatternRewriter, trace: Trace | None = None) -> list[Match]:
    """Every formula of a graph, in graph order; of those that overlap the outermost."""
    catalogue, scope = rewriter.catalogue, rewriter.graph.scope
    if not catalogue.net.patterns:
        return []
    started = time.perf_counter()
    matcher = Matcher(catalogue.net, scope.facts, scope.opset, catalogue.readers, trace)
    found: list[Match] = []
    taken: set[ir.Node] = set()
    for node in reversed(list(scope.graph)):
        match = None
        with contained(_LOOKING, label(node)):
            match = None if node in taken else matcher.at(node)
        if match is not None and taken.isdisjoint(match.state.nodes):
            taken.update(match.state.nodes)
            found.append(match)
    rewriter.statistics.matching += time.perf_counter() - started
    return found[::-1]


def write_formulas(rewriter: PatternRewriter, trace: Trace | None = None) -> None:
    """Replaces formulas by their meaning; notes what patterns refuse or merely name."""
    for match in find_formulas(rewriter, trace):
        pattern, softmaxes = match.variant.pattern, match.state.softmaxes
        end = producer_of(match.root.value)
        with rewriter.statistics.trying(pattern.name) as tried:
            if pattern.refused is not None:
                reason = dataclasses.replace(pattern.refused, node=end.name)
                rewriter.refused.update((label(node), reason) for node in softmaxes)
                rewriter.spoken.update({} if softmaxes else {label(end): reason})
                tried.hit = True
            elif pattern.restates:
                rewriter.named.update((label(node), pattern.name) for node in softmaxes)
                tried.hit = True
            else:
                make, taken = functools.partial(_meant, match, rewriter), match.variant.name
                tried.hit = rewriter.attempt(end, pattern.name, make, softmaxes, taken)


def _meant(match: Match, rewriter: PatternRewriter) -> NewNodes:
    """The meaning of a matched formula as nodes.

    Raises:
        Refused: An inner value is used elsewhere, or it cannot be written.
    """
    if not rewriter.keep_outputs:
        for reason in _outside(match):
            raise reason
    written = write(match, rewriter.graph.builder)
    return NewNodes(written.new, written.softmaxes, written.frontier, replaced=len(set(match.state.nodes)))


def _outside(match: Match) -> Iterator[Refused]:
    """Inner values that are used elsewhere, so that their producers would stay."""
    inside = set(match.state.nodes)
    for node in match.state.nodes:
        for value in node.outputs:
            if value is match.root.value:
                continue
            if value.is_graph_output():
                yield Refused("inner-value-used", f"the intermediate value '{value.name}' is an output of the graph", node.name)
            for user in viewers(value):
                if user not in inside:
                    message = f"the intermediate value '{value.name}' is also used by {user.op_type} '{user.name}'"
                    yield Refused("inner-value-used", message, node.name)
