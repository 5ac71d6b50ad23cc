"""Roundings taken out of attentions, so that attention in floats is left, and put back where nothing was fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.attention.spec import AttentionSpec, plain_masks
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rounding import read_pair
from onnx_attnfuse.graph.sweep import Detached, detach, sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.report.model import SiteReport


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """The roundings of one attention that were taken out of its graph."""

    name: str
    """Of the attention's softmax."""
    uses: tuple[tuple[ir.Node, int, ir.Value], ...]
    """The nodes that read rounded values, the places where they did, and these values; the last that was taken out first."""
    nodes: tuple[Detached, ...]

    def put_back(self, nodes: Sequence[Detached]) -> None:
        """Restores the roundings that are not in the graph already; nodes are to be sorted afterwards.

        Args:
            nodes: All that was taken out, as attentions may share the rounding of a mask.
        """
        for user, place, rounded in self.uses:
            for detached in nodes:
                last = detached.nodes[-1][0] if detached.nodes else None
                if last is not None and last.graph is None and rounded in last.outputs:
                    detached.restore(user)
            user.replace_input_with(place, rounded)

    def drop(self) -> None:
        """Removes nodes that only these roundings read."""
        sweep(value for detached in self.nodes for _, inputs in detached.nodes for value in inputs)


def leave_out(candidates: Iterable[Candidate], facts: Facts) -> list[LeftOut]:
    """Takes the roundings inside of attentions out, in place, and those of masks where they meet the scores.

    Args:
        candidates: Attentions; those that round nothing inside are left alone.
        facts: Facts on the graph.
    """
    return [_left_out(label(item.node), item.rounded, facts) for item in candidates if item.rounded is not None]


def _left_out(name: str, spec: AttentionSpec, facts: Facts) -> LeftOut:
    own = set(spec.nodes)
    uses: list[tuple[ir.Node, int, ir.Value]] = []
    nodes: list[Detached] = []

    def take_out(rounded: ir.Value, plain: ir.Value) -> None:
        for user, place in list(rounded.uses()):
            if user in own:
                user.replace_input_with(place, plain)
                uses.append((user, place, rounded))
        nodes.append(detach([rounded]))

    for rounded, plain in plain_masks(spec).items():
        take_out(rounded, plain)
    for node in spec.nodes:
        pair = read_pair(node, facts)
        if pair is not None:
            take_out(pair.after, pair.before)
    return LeftOut(name, tuple(reversed(uses)), tuple(reversed(nodes)))


def put_back(left: Iterable[LeftOut], sites: Iterable[SiteReport]) -> int:
    """Puts the roundings of attentions back that were not fused; how many attentions these are."""
    left, done = list(left), _done(sites)
    again = [item for item in left if item.name not in done]
    nodes = [detached for item in left for detached in item.nodes]
    for item in again:
        item.put_back(nodes)
    for item in left:
        item.drop()
    return len(again)


def counted(left: Sequence[LeftOut], sites: Iterable[SiteReport]) -> tuple[int, int]:
    """How many attentions were fused without their roundings, and how many roundings these are."""
    done = _done(sites)
    kept = [item for item in left if item.name in done]
    return len(kept), sum(len({rounded for _, _, rounded in item.uses}) for item in kept)


def _done(sites: Iterable[SiteReport]) -> set[str]:
    """The names of attentions that are fused, or have the form that their execution provider fuses."""
    return {site.name for site in sites if site.is_rewritten or site.status == "decomposed"}
