"""Formulas found and written as what they mean."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.equations.matching import Matcher
from onnx_attnfuse.equations.state import Match
from onnx_attnfuse.equations.trace import Trace
from onnx_attnfuse.equations.writing import write
from onnx_attnfuse.graph.uses import label, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.respelling.changes import Changes, Made

_LOOKING = Subject("looking for patterns")


def find_formulas(changes: Changes, trace: Trace | None = None) -> list[Match]:
    """Every formula that stands in a graph, in graph order; of those that overlap the outermost."""
    catalogue, scope = changes.catalogue, changes.scope
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
    changes.tally.matching += time.perf_counter() - started
    return found[::-1]


def write_formulas(changes: Changes, trace: Trace | None = None) -> None:
    """Writes what formulas mean in their place; notes what patterns refuse or merely name."""
    for match in find_formulas(changes, trace):
        pattern, softmaxes = match.variant.pattern, match.state.softmaxes
        end = match.root.value.producer()
        assert end is not None
        with changes.tally.trying(pattern.name) as tried:
            if pattern.refused is not None:
                reason = dataclasses.replace(pattern.refused, node=end.name)
                changes.refused.update((label(node), reason) for node in softmaxes)
                changes.spoken.update({} if softmaxes else {label(end): reason})
                tried.hit = True
            elif pattern.restates:
                changes.named.update((label(node), pattern.name) for node in softmaxes)
                tried.hit = True
            else:
                make, taken = functools.partial(_meant, match, changes), match.variant.name
                tried.hit = changes.attempt(end, pattern.name, make, softmaxes, taken)


def _meant(match: Match, changes: Changes) -> Made:
    """What a formula means.

    Raises:
        Refused: An inner value is used elsewhere, or it cannot be written.
    """
    if not changes.keep_outputs:
        for reason in _outside(match):
            raise reason
    written = write(match, changes.builder)
    return Made(written.new, written.softmaxes, written.stops, replaced=len(set(match.state.nodes)))


def _outside(match: Match) -> Iterator[Refused]:
    """Inner values that are used elsewhere, so that what computes them would stay."""
    inside = set(match.state.nodes)
    for node in match.state.nodes:
        for value in node.outputs:
            if value is match.root.value:
                continue
            if value.is_graph_output():
                yield Refused("inner-value-used", f"the inner value '{value.name}' is an output of the graph", node.name)
            for user in viewers(value):
                if user not in inside:
                    message = f"the inner value '{value.name}' is also used by {user.op_type} '{user.name}'"
                    yield Refused("inner-value-used", message, node.name)
