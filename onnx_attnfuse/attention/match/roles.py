"""The nodes of an attention by their role in it, and its roundings in a quantised model, each with its place.

Roles have the names that a quantiser's list of exclusions asks for. Roundings are of operands, scores, mask, weights and result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.paths import ScorePath, WeightPath
from onnx_attnfuse.attention.match.steps import (
    Added,
    Replaced,
    Rounded,
    RoundedWeights,
    ScoreStep,
    Taken,
    WeightStep,
)
from onnx_attnfuse.attention.roundings import VIEWS, Place, Rounding, steps_above, steps_below
from onnx_attnfuse.attention.spec import AttentionSpec, Role, Source
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, GATHERS, REARRANGES, REDUCTIONS, REPEATS, SLICES
from onnx_attnfuse.graph.rounding import read_pair
from onnx_attnfuse.graph.uses import sources


def score_roundings(steps: Iterable[Taken[ScoreStep]]) -> Iterator[Rounding]:
    """The roundings of scores, first step first."""
    place: Place = "scores"
    masked = False
    for step in (taken.step for taken in steps):
        if isinstance(step, Rounded):
            yield Rounding(place, step.pair)
        elif step.role == "scale":
            place = place if masked else "scaled"
        elif step.role == "softcap":
            place = "capped"
        elif step.role == "mask":
            place, masked = "masked", True


def weight_roundings(steps: Iterable[Taken[WeightStep]]) -> Iterator[Rounding]:
    """The roundings of attention weights, first step first."""
    place: Place = "weights"
    for step in (taken.step for taken in steps):
        if isinstance(step, RoundedWeights):
            yield Rounding(place, step.pair)
        elif step.role != "scale":
            place = "guarded"


def mask_roundings(steps: Iterable[Taken[ScoreStep]], facts: Facts) -> Iterator[Rounding]:
    """The roundings of summands of scores, right where they are added, the earliest of each first."""
    for taken in steps:
        found: list[Rounding] = []
        value = taken.step.operand if isinstance(taken.step, Added) else None
        while value is not None and (pair := read_pair(value.producer(), facts)) is not None:
            found.append(Rounding("mask", pair))
            value = pair.before
        yield from reversed(found)


def operand_roundings(place: Place, operand: ir.Value, facts: Facts) -> tuple[Rounding, ...]:
    """The roundings of an operand up to its producer, the earliest first; views and factors are gone through."""
    return tuple(reversed([Rounding(place, step.pair) for step in steps_above(operand, facts) if step.pair is not None]))


def result_roundings(result: IndexedValue, facts: Facts) -> tuple[Rounding, ...]:
    """The roundings of the result as those have them who alone look at it, through views."""
    steps = itertools.takewhile(lambda step: step.factor is None, steps_below(result.value, facts))
    return tuple(Rounding("output", step.pair) for step in steps if step.pair is not None)


_ARITHMETIC = (ELEMENTWISE | REARRANGES | REPEATS | SLICES | GATHERS | CASTS | REDUCTIONS).union(
    "CastLike Concat Constant ConstantOfShape CumSum EyeLike NonZero OneHot Pad Range ScatterElements ScatterND Trilu".split(),
    "DequantizeLinear QuantizeLinear".split(),
)
"""Operators of masks."""
_MOST_NODES = 4096


def with_roles(
    spec: AttentionSpec, softmax: Iterable[ir.Node], scores: ScorePath, weights: WeightPath, facts: Facts
) -> AttentionSpec:
    """The attention with its nodes by role, each once.

    Args:
        spec: The attention.
        softmax: The nodes of the softmax.
        scores: The way from the product of queries and keys.
        weights: The way to the product with the values.
        facts: Facts on the graph.
    """
    found: dict[ir.Node, Role] = {scores.product.contraction.node: "scores", weights.contraction.node: "result"}
    found |= dict.fromkeys(softmax, "softmax")
    for taken in (*scores.steps, *weights.steps):
        found |= dict.fromkeys((taken.node, *taken.step.further), taken.step.role)
    for operand in (*spec.operands(), *(() if spec.cache is None else spec.cache.new)):
        found |= _of_operand(operand, facts)
    after = (reading.value.producer() for reading in spec.output[1:])
    views = (*scores.nodes, *weights.nodes, *filter(None, after))
    found |= {node: "view" for node in views if node not in found}
    steps = (taken.step for taken in scores.steps)
    masks = [step.operand if isinstance(step, Added) else step.condition for step in steps if isinstance(step, (Added, Replaced))]
    found |= {node: "mask_input" for node in _computing(masks) if node not in found}
    return dataclasses.replace(spec, roles=tuple((role, node) for node, role in found.items()))


def _of_operand(operand: tuple[Source, ...], facts: Facts) -> dict[ir.Node, Role]:
    """The views and factors of an operand, after roundings too, and its rotary embedding."""
    found: dict[ir.Node, Role] = {}
    for source, further in itertools.pairwise(operand):
        node = source.indexed.value.producer()
        if further.rotary is not None and source.rotary is None:
            found |= dict.fromkeys(further.rotary.nodes, "rotary")
        elif node is not None and is_standard(node, *VIEWS):
            found[node] = "view"
    for source in operand:
        steps = steps_above(source.indexed.value, facts)
        found |= dict.fromkeys((step.node for step in steps if step.factor is not None), "scale")
    return found


def _computing(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that compute masks, up to inputs and to products, as of a bias that queries make."""
    above = itertools.islice(sources(values, lambda _, node: is_standard(node, *_ARITHMETIC)), _MOST_NODES)
    nodes = (value.producer() for value in above)
    return (node for node in nodes if is_standard(node, *_ARITHMETIC) and node.op_type != "Constant")
