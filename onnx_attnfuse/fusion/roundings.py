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
import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.attention.spec import AttentionSpec, plain_masks
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes, constant_array, is_standard
from onnx_attnfuse.graph.edit import put_back
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS
from onnx_attnfuse.graph.rounding import QdqPair, quantizes, read_pair
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.sweep import Detached, detach, sweep
from onnx_attnfuse.graph.uses import label, viewers
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

_MOST_STEPS = 24
_MOVING = Subject("moving roundings over views")


@dataclasses.dataclass(frozen=True)
class _Step:
    """A view, a factor or a rounding on a tensor."""

    before: ir.Value
    after: ir.Value
    node: ir.Node
    pair: QdqPair | None = None
    factor: float | None = None

    @property
    def is_view(self) -> bool:
        """Whether elements only go elsewhere, perhaps several times."""
        return self.pair is None and self.factor is None


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


def _moved(site: str, steps: Sequence[_Step], order: Order, graph: GraphContext) -> Moved | None:
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


def _ordered(steps: Sequence[_Step], order: Order, facts: Facts) -> list[_Step] | None:
    """The steps in their new order; None where they have it, or nothing is rounded."""
    if not any(step.pair for step in steps):
        return None
    views = [step for step in steps if step.is_view]
    rest = [step for step in steps if not step.is_view]
    found = _merged([*views, *_factors_first(rest, facts)] if order == "views first" else [*rest, *views])
    return None if [step.node for step in found] == [step.node for step in steps] else found


def _factors_first(steps: Sequence[_Step], facts: Facts) -> list[_Step]:
    """Factors that are powers of two before the roundings that they follow, whose scales they multiply."""
    found: list[_Step] = []
    for step in steps:
        place = len(found)
        while step.factor is not None and place and _takes(found[place - 1], step.factor, facts):
            place -= 1
            found[place] = dataclasses.replace(found[place], factor=(found[place].factor or 1.0) * step.factor)
        found.insert(place, step)
    return found


def _takes(step: _Step, factor: float, facts: Facts) -> bool:
    """Whether a step is a rounding of float32 that takes a factor into its scale: a power of two, so that no bit changes."""
    if step.pair is None or math.frexp(factor)[0] != 0.5 or facts.dtype(step.before) != ir.DataType.FLOAT:
        return False
    scale = constant_array(step.pair.quantize.inputs[1])
    product = 0.0 if scale is None else float(scale.reshape(-1)[0]) * (step.factor or 1.0) * factor
    return 2.0**-100 < product < 2.0**100


def _merged(steps: Sequence[_Step]) -> list[_Step]:
    """The steps without roundings to the grid that the one right before rounds to already."""
    found: list[_Step] = []
    for step in steps:
        if found and step.pair is not None and found[-1].pair is not None and _same_grid(found[-1], step):
            continue
        found.append(step)
    return found


def _same_grid(one: _Step, other: _Step) -> bool:
    assert one.pair is not None
    assert other.pair is not None
    if (
        one.pair.dtype != other.pair.dtype
        or one.factor != other.factor
        or one.pair.dequantize.domain != other.pair.dequantize.domain
    ):
        return False
    pairs = zip(one.pair.dequantize.inputs[1:], other.pair.dequantize.inputs[1:], strict=False)
    if len(one.pair.dequantize.inputs) != len(other.pair.dequantize.inputs):
        return False
    arrays = ((constant_array(left), constant_array(right)) for left, right in pairs)
    return all(left is not None and right is not None and np.array_equal(left.ravel(), right.ravel()) for left, right in arrays)


def _again(step: _Step, value: ir.Value, builder: Builder) -> ir.Value:
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


def _copied(node: ir.Node, inputs: Sequence[ir.Value | None], builder: Builder, value: ir.Value, step: _Step) -> ir.Value:
    """A node like another on other inputs."""
    return builder.node(node.op_type, inputs, attributes(node), domain=node.domain, hint=f"{node.name or node.op_type}/moved")


def _above(operand: ir.Value, facts: Facts) -> list[_Step]:
    """The steps between an operand's producer and the operand, the earliest first."""
    found: list[_Step] = []
    value = operand
    while len(found) < _MOST_STEPS:
        step = _step(value.producer(), facts)
        if step is None or step.after is not value:
            break
        found.append(step)
        value = step.before
    return found[::-1]


def _below(result: ir.Value, facts: Facts) -> list[_Step]:
    """The steps after a result that are its only users, up to the last rounding."""
    found: list[_Step] = []
    value = result
    while len(found) < _MOST_STEPS and not value.is_graph_output():
        users = viewers(value)
        node = users[0] if len(users) == 1 else None
        if quantizes(node):
            readers = viewers(node.outputs[0])
            node = readers[0] if len(readers) == 1 else None
        step = _step(node, facts)
        if step is None or step.before is not value or step.factor is not None:
            break
        found.append(step)
        value = step.after
    while found and found[-1].is_view:
        found.pop()
    return found


def _step(node: ir.Node | None, facts: Facts) -> _Step | None:
    """The step that a node is, or ends; None where it is none that can be moved."""
    pair = read_pair(node, facts)
    if pair is not None:
        movable = pair.axis is None and not pair.block_size and not pair.is_computed and facts.dims(pair.before) is not None
        return _Step(pair.before, pair.after, pair.dequantize, pair) if movable else None
    if node is None or not node.inputs or node.inputs[0] is None or facts.dims(node.outputs[0]) is None:
        return None
    if is_standard(node, *REARRANGES, *REPEATS):
        return _Step(node.inputs[0], node.outputs[0], node)
    scaling = read_scaling(node, facts)
    if scaling is None or facts.rank(scaling.operand) not in {0, 1}:
        return None
    return _Step(scaling.tensor, node.outputs[0], node, factor=scaling.of(1.0))
