"""Roundings of attentions taken out or moved over views, and put back where nothing was fused.

Those inside are taken out on request, so that attention in floats is left. Those of operands and results are moved, which changes
no bit where a tensor has one scale:

    x ─ Reshape ─ [Q DQ] ─ Transpose ─ [Q DQ] ─ attention        as quantisers write it
    x ─ [Q DQ] ─ Reshape ─ Transpose ─ attention                 views together: a fused operator takes x as it lies
    x ─ Reshape ─ Transpose ─ [Q DQ] ─ attention                 roundings together: products of providers that fuse by themselves

Two roundings to one grid that come together are one. A factor goes over a rounding only if it is a power of two: then the scale
is multiplied by it, and all numbers stay the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.attention.roundings import Step, steps_above, steps_below
from onnx_attnfuse.attention.spec import AttentionSpec, plain_masks
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes, constant_array, is_standard
from onnx_attnfuse.graph.edit import put_back
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS
from onnx_attnfuse.graph.rounding import read_pair, same_grid
from onnx_attnfuse.graph.sweep import Detached, detach, sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.transforms.rewriting import GraphContext


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


def restore_unused(left: Iterable[LeftOut], sites: Iterable[SiteReport]) -> int:
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


Order: TypeAlias = Literal["roundings first", "views first"]
"""The first kind, seen from the node that computes an operand."""

_MOVING = Subject("moving roundings over views")


@dataclasses.dataclass(frozen=True)
class Moved:
    """One tensor whose roundings were moved, with the nodes that made it before."""

    site: str
    """The name of the attention's softmax or operator."""
    old: ir.Value
    new: ir.Value
    nodes: Detached

    def finish(self, builder: Builder, *, useful: bool) -> int:
        """Puts the old nodes back where the new ones were of no use, if all that they read is there; 1 where that was done."""
        if not useful and put_back(self.old, self.new, self.nodes, builder):
            return 1
        sweep(value for _, inputs in self.nodes.nodes for value in inputs)
        return 0


def move_roundings(candidates: Iterable[Candidate], graph: GraphContext, order: Order) -> list[Moved]:
    """Moves the roundings of operands and results of attentions, each verified.

    Args:
        candidates: The attentions, which are to be read anew afterwards.
        graph: Their graph.
        order: The kind that comes first on the way to an attention; after its result views come first in any case.
    """
    found: list[Moved | None] = []
    for item in candidates:
        spec, facts = item.read, graph.scope.facts
        if spec is None or not spec.roundings:
            continue
        operands = dict.fromkeys(source[0].indexed.value for source in spec.operands())
        found += [_moved(label(item.node), _above(operand, facts), order, graph) for operand in operands]
        if order == "roundings first":
            found.append(_moved(label(item.node), _below(spec.output[0].value, facts), "views first", graph))
    return [item for item in found if item is not None]


def _moved(site: str, steps: Sequence[Step], order: Order, graph: GraphContext) -> Moved | None:
    wanted = _ordered(steps, order, graph.scope.facts)
    if wanted is None:
        return None
    old, new, removed = steps[-1].after, steps[0].before, Detached(())
    with graph.rewrite(steps[-1].node, _MOVING) as edit:
        for step in wanted:
            new = _again(step, new, graph.builder)
        graph.verify([(old, new)], [steps[0].before], site)
        edit.connect([(old, new)])
        removed = detach([old])
    return Moved(site, old, new, removed) if removed.nodes else None


def _ordered(steps: Sequence[Step], order: Order, facts: Facts) -> list[Step] | None:
    """The steps in their new order; None where they have it, or nothing is rounded."""
    if not any(step.pair for step in steps):
        return None
    views = [step for step in steps if _is_view(step)]
    rest = [step for step in steps if not _is_view(step)]
    found = _merged([*views, *_factors_first(rest, facts)] if order == "views first" else [*rest, *views])
    return None if [step.node for step in found] == [step.node for step in steps] else found


def _factors_first(steps: Sequence[Step], facts: Facts) -> list[Step]:
    """Factors that are powers of two before the roundings that they follow, whose scales they multiply."""
    found: list[Step] = []
    for step in steps:
        place = len(found)
        while step.factor is not None and place and _takes(found[place - 1], step.factor, facts):
            place -= 1
            found[place] = dataclasses.replace(found[place], factor=(found[place].factor or 1.0) * step.factor)
        found.insert(place, step)
    return found


def _takes(step: Step, factor: float, facts: Facts) -> bool:
    """Whether a step is a rounding of float32 that takes a factor into its scale: a power of two, so that no bit changes."""
    if step.pair is None or math.frexp(factor)[0] != 0.5 or facts.dtype(step.before) != ir.DataType.FLOAT:
        return False
    scale = constant_array(step.pair.quantize.inputs[1])
    product = 0.0 if scale is None else float(scale.reshape(-1)[0]) * (step.factor or 1.0) * factor
    return 2.0**-100 < product < 2.0**100


def _merged(steps: Sequence[Step]) -> list[Step]:
    """The steps without roundings to the grid that the one right before rounds to already."""
    found: list[Step] = []
    for step in steps:
        last = found[-1] if found else None
        is_again = last is not None and last.pair is not None and step.pair is not None and same_grid(last.pair, step.pair)
        if last is None or not is_again or last.factor != step.factor:
            found.append(step)
    return found


def _again(step: Step, value: ir.Value, builder: Builder) -> ir.Value:
    """The step once more, on another tensor."""
    if step.pair is None:
        return _copied(step.node, [value if item is step.before else item for item in step.node.inputs], builder, value, step)
    quantize, dequantize = step.pair.nodes
    scale = quantize.inputs[1]
    assert scale is not None
    if step.factor is not None:
        array = constant_array(scale)
        assert array is not None
        scale = builder.scalar(float(array.reshape(-1)[0]) * step.factor, builder.facts.dtype(scale))
    codes = _copied(quantize, [value, scale, *quantize.inputs[2:]], builder, value, step)
    return _copied(dequantize, [codes, scale, *dequantize.inputs[2:]], builder, value, step)


def _copied(node: ir.Node, inputs: Sequence[ir.Value | None], builder: Builder, value: ir.Value, step: Step) -> ir.Value:
    """A node like another on other inputs."""
    return builder.node(node.op_type, inputs, attributes(node), domain=node.domain, hint=f"{node.name or node.op_type}/moved")


def _above(operand: ir.Value, facts: Facts) -> list[Step]:
    """The steps between an operand's producer and the operand, the earliest first."""
    return [*itertools.takewhile(lambda step: _may_move(step, facts), steps_above(operand, facts))][::-1]


def _below(result: ir.Value, facts: Facts) -> list[Step]:
    """The steps after a result that are its only users, up to the last rounding."""
    steps = steps_below(result, facts)
    found = [*itertools.takewhile(lambda step: step.factor is None and _may_move(step, facts), steps)]
    while found and _is_view(found[-1]):
        found.pop()
    return found


def _is_view(step: Step) -> bool:
    """Whether elements only go elsewhere, perhaps several times."""
    return step.pair is None and step.factor is None


def _may_move(step: Step, facts: Facts) -> bool:
    """Whether a step can change places with others: a rounding by one scale, a view of known shape, or a factor of no axes."""
    if step.pair is not None:
        is_one = step.pair.axis is None and not step.pair.block_size and not step.pair.is_computed
        return is_one and facts.dims(step.before) is not None
    if facts.dims(step.after) is None:
        return False
    if step.factor is None:
        return is_standard(step.node, *REARRANGES, *REPEATS)
    return all(facts.rank(value) in {0, 1} for value in step.node.inputs if value is not None and value is not step.before)
