"""The nodes of an attention by their role in it, by the names that a quantiser's list of exclusions asks for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.match.roundings import factors
from onnx_attnfuse.attention.match.scores import ScorePath
from onnx_attnfuse.attention.match.steps import (
    Added,
    Floored,
    LowZeroed,
    NaNZeroed,
    Negated,
    Renormalized,
    Replaced,
    Rounded,
    RoundedWeights,
    Scaled,
    Shifted,
    Squashed,
    Voided,
    Weighted,
    Zeroed,
)
from onnx_attnfuse.attention.match.weights import WeightPath
from onnx_attnfuse.attention.roles import Role
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, ELEMENTWISE, GATHERS, REARRANGES, REDUCTIONS, REPEATS, SLICES

_ARITHMETIC = (ELEMENTWISE | REARRANGES | REPEATS | SLICES | GATHERS | CASTS | REDUCTIONS).union(
    "CastLike Concat Constant ConstantOfShape CumSum EyeLike NonZero OneHot Pad Range ScatterElements ScatterND Trilu".split(),
    "DequantizeLinear QuantizeLinear".split(),
)
"""Operators of masks."""
_VIEWS = REARRANGES | REPEATS | SLICES | CASTS
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
        found |= _role(taken.step, taken.node)
    for operand in (*spec.operands(), *(() if spec.cache is None else spec.cache.new)):
        found |= _of_operand(operand, facts)
    after = (reading.value.producer() for reading in spec.output[1:])
    views = (*scores.nodes, *weights.nodes, *filter(None, after))
    found |= {node: "view" for node in views if node not in found}
    steps = (taken.step for taken in scores.steps)
    masks = [step.operand if isinstance(step, Added) else step.condition for step in steps if isinstance(step, (Added, Replaced))]
    found |= {node: "mask_input" for node in _computing(masks) if node not in found}
    return dataclasses.replace(spec, roles=tuple((role, node) for node, role in found.items()))


def _role(step: object, node: ir.Node) -> dict[ir.Node, Role]:
    also: tuple[ir.Node, ...] = getattr(step, "also", ())
    match step:
        case Scaled() | Negated() | Weighted():
            role: Role = "scale"
        case Added() | Replaced() | Floored():
            role = "mask"
        case Squashed():
            role = "softcap"
        case LowZeroed() | NaNZeroed() | Zeroed() | Voided():
            role = "guard"
        case Rounded() | RoundedWeights():
            role = "rounding"
        case Shifted() | Renormalized():
            role = "softmax"
        case _:
            role = "view"
    return dict.fromkeys((node, *also), role)


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
    pending, seen = list(values), set[ir.Node]()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop().producer()
        if node is None or node in seen or not is_standard(node, *_ARITHMETIC):
            continue
        seen.add(node)
        if node.op_type != "Constant":
            yield node
        pending += [value for value in node.inputs if value is not None]
