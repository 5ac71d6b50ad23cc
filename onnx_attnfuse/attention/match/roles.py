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
from onnx_attnfuse.attention.roundings import Place, Rounding
from onnx_attnfuse.attention.spec import AttentionSpec, Role, Source
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, GATHERS, REARRANGES, REDUCTIONS, REPEATS, SLICES
from onnx_attnfuse.graph.rounding import quantizes, read_pair
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.uses import sources, viewers

_VIEWS = REARRANGES | REPEATS | SLICES | CASTS
_MOST_STEPS = 24
"""Operators between an operand and its projection: longer chains do not occur."""


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
    pairs = (read_pair(node, facts) for node in _above(operand, facts))
    return tuple(reversed([Rounding(place, pair) for pair in pairs if pair is not None]))


def factors(operand: ir.Value, facts: Facts) -> Iterator[ir.Node]:
    """The nodes that multiply or divide an operand by a number, up to its producer."""
    return (node for node in _above(operand, facts) if is_standard(node, "Mul", "Div"))


def _above(operand: ir.Value, facts: Facts) -> Iterator[ir.Node]:
    """Views, factors and roundings of an operand, the last that is computed first."""
    value = operand
    for _ in range(_MOST_STEPS):
        node = value.producer()
        if node is None:
            return
        pair = read_pair(node, facts)
        before = _before(node, facts) if pair is None else pair.before
        if before is None:
            return
        yield node
        value = before


def result_roundings(result: IndexedValue, facts: Facts) -> tuple[Rounding, ...]:
    """The roundings of the result as those have them who alone look at it, through views."""
    found: list[Rounding] = []
    value = result.value
    for _ in range(_MOST_STEPS):
        users = viewers(value)
        if len(users) != 1 or value.is_graph_output():
            break
        node = users[0]
        if quantizes(node):
            readers = viewers(node.outputs[0])
            pair = read_pair(readers[0], facts) if len(readers) == 1 else None
            if pair is None:
                break
            found.append(Rounding("output", pair))
            value = pair.after
        elif is_standard(node, *_VIEWS):
            value = node.outputs[0]
        else:
            break
    return tuple(found)


def _before(node: ir.Node, facts: Facts) -> ir.Value | None:
    """The tensor that a view, or a product or quotient with a number, is made of."""
    if is_standard(node, *_VIEWS):
        return node.inputs[0]
    scaling = read_scaling(node, facts)
    return None if scaling is None else scaling.tensor


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
        elif node is not None and is_standard(node, *_VIEWS):
            found[node] = "view"
    for source in operand:
        found |= dict.fromkeys(factors(source.indexed.value, facts), "scale")
    return found


def _computing(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that compute masks, up to inputs and to products, as of a bias that queries make."""
    above = itertools.islice(sources(values, lambda _, node: is_standard(node, *_ARITHMETIC)), _MOST_NODES)
    nodes = (value.producer() for value in above)
    return (node for node in nodes if is_standard(node, *_ARITHMETIC) and node.op_type != "Constant")
