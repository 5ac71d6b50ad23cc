"""A residual sum and the normalization of it as one operator that gives both.

ONNX Runtime's own fusion wants a sum that nothing else looks at, as after each block of BERT. Where the normalization comes
first, as nearly everywhere since, the sum goes on as the next residual: then the sum, the bias before it and the normalization
are passes of their own.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import added_bias
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.uses import producer_of

_PACKED, _RANKS = 2, {2, 3}


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A normalization along the last axis."""

    op: str
    summed: ir.Value
    weights: tuple[ir.Value, ...]
    epsilon: float
    result: ir.Value


def as_skip_norm(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """LayerNormalization, or RMS normalization spelled out, of a sum that is looked at elsewhere too."""
    facts = builder.facts
    norm = _layer_norm(node, facts) or _rms_norm(node, facts)
    if norm is None:
        return None
    total = norm.summed
    sum_node, dims = total.producer(), facts.dims(total)
    if not is_standard(sum_node, "Add") or dims is None or len(dims) not in _RANKS:
        return None
    left, right = sum_node.inputs
    if left is None or right is None or facts.dims(left) != dims or facts.dims(right) != dims:
        return None
    if any(facts.dims(weight) != dims[-1:] or facts.dtype(weight) != facts.dtype(total) for weight in norm.weights):
        return None
    biased, other = _with_bias(left, right, facts)
    inputs: list[ir.Value | None] = [biased[0], other, *norm.weights]
    if biased[1] is not None:
        inputs += [None] * (4 - len(inputs)) if norm.op == "SkipLayerNormalization" else []
        inputs.append(biased[1])
    builder.at(sum_node)
    fused = builder.node(
        norm.op,
        inputs,
        {"epsilon": norm.epsilon},
        domain=CONTRIB,
        dims=dims,
        dtype=facts.dtype(total),
        hint=f"{node.name}/{norm.op}",
        outputs=4,
    )
    made = producer_of(fused)
    for unused in made.outputs[1:3]:
        unused.name = ""
        unused.dtype = ir.DataType.FLOAT  # statistics are in float32 whatever is normalized
    facts.copy(total, made.outputs[3])
    frontier = tuple(value for value in inputs[:2] if value is not None)
    return EnablingChange(((norm.result, fused), (total, made.outputs[3])), frontier)


def _with_bias(left: ir.Value, right: ir.Value, facts: Facts) -> tuple[tuple[ir.Value, ir.Value | None], ir.Value]:
    """The operands of a sum, one of them without its bias if it has one that nothing else needs."""
    for one, other in ((left, right), (right, left)):
        biased = added_bias(one, facts) if len(one.uses()) == 1 and not one.is_graph_output() else None
        if biased is not None:
            return biased, other
    return (left, None), right


def _layer_norm(node: ir.Node, facts: Facts) -> _Norm | None:
    if not is_standard(node, "LayerNormalization") or any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None
    total, *weights = node.inputs
    rank = None if total is None else facts.rank(total)
    if total is None or rank is None or attribute(node, "axis", -1) % rank != rank - 1 or attribute(node, "stash_type", 1) != 1:
        return None
    if not _is_shared(total, {node}, facts):
        return None
    kept = tuple(value for value in weights if value is not None)
    return _Norm("SkipLayerNormalization", total, kept, attribute(node, "epsilon", 1e-5), node.outputs[0])


def _rms_norm(node: ir.Node, facts: Facts) -> _Norm | None:
    """`w · x / sqrt(mean(x²) + eps)`, from the product with the weights; x may be widened to float32 on the way."""
    if not is_standard(node, "Mul"):
        return None
    for one, weight in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        if one is None or weight is None or facts.rank(weight) != 1:
            continue
        inside: list[ir.Node] = [node]
        quotient = _through_cast(one, inside)
        if not is_standard(quotient, "Div") or quotient.inputs[0] is None:
            continue
        wide = quotient.inputs[0]
        epsilon = _root_mean_square(quotient.inputs[1], wide, inside, facts)
        if epsilon is None:
            continue
        inside.append(quotient)
        widened = wide.producer()
        total = wide
        if is_standard(widened, "Cast") and widened.inputs[0] is not None:
            inside.append(widened)
            total = widened.inputs[0]
        alone = all(user in inside for item in inside[1:] for value in item.outputs for user, _ in value.uses())
        if not alone or not _is_shared(total, set(inside), facts) or facts.dtype(node.outputs[0]) != facts.dtype(total):
            continue
        return _Norm("SkipSimplifiedLayerNormalization", total, (weight,), epsilon, node.outputs[0])
    return None


def _root_mean_square(value: ir.Value | None, wide: ir.Value, inside: list[ir.Node], facts: Facts) -> float | None:
    """The number that is added under the root, if `value` is the root mean square of `wide` along its last axis."""
    found: list[ir.Node] = []
    for op in ("Sqrt", "Add", "ReduceMean", "Pow"):
        node = None if value is None else value.producer()
        if op == "Pow" and is_standard(node, "Mul") and set(node.inputs) == {wide}:
            found.append(node)
            break
        if not is_standard(node, op):
            return None
        found.append(node)
        value = node.inputs[0]
        if op == "Add" and value is not None and facts.number(value) is not None:
            value = node.inputs[1]
    added, reduced, squared = found[1:]
    rank = facts.rank(wide)
    if squared.inputs[0] is not wide or rank is None or axes_of(reduced, 1, rank, facts) != [rank - 1]:
        return None
    if squared.op_type == "Pow" and (squared.inputs[1] is None or facts.number(squared.inputs[1]) != 2):
        return None
    numbers = [facts.number(item) for item in added.inputs if item is not None]
    inside += found
    return next((number for number in numbers if number is not None), None)


def _through_cast(value: ir.Value, inside: list[ir.Node]) -> ir.Node | None:
    node = value.producer()
    if is_standard(node, "Cast") and node.inputs[0] is not None:
        inside.append(node)
        return node.inputs[0].producer()
    return node


def _is_shared(value: ir.Value, inside: set[ir.Node], facts: Facts) -> bool:
    """Whether others look at a value too; if nobody does, ONNX Runtime fuses by itself, but not on packed tokens."""
    return facts.rank(value) == _PACKED or value.is_graph_output() or any(user not in inside for user, _ in value.uses())
