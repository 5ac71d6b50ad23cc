"""Normalizations, and the residual sums before them, as ONNX Runtime's own fusions and kernels want them.

RMS normalization in half precision with factors in float32, or with none, becomes com.microsoft BranchwiseRMSNorm:

    x ── Cast ── x / sqrt(mean(x²) + ε) ── Mul(w) ── Cast        becomes        x ── BranchwiseRMSNorm(w)

So Gemma has it, whose factors are `1 + w` in float32, and inputs normalized without factors. ONNX Runtime fuses the middle, if
that is not heads after a Transpose, and the casts stay. With factors in x's own type it fuses all by itself.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling, own_bias
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, both_ways, is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.uses import is_read_once, origin, producer_of
from onnx_attnfuse.kernels.operators import branchwise_rms_norm
from onnx_attnfuse.targets.rms_norm import RmsNorm, read_rms_norm


@enabling("x * (1 / r) rewritten as x / r, so that ONNX Runtime fuses RMSNorm", "Mul", "quotients")
def as_quotient(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A Mul by a Reciprocal that nothing else looks at, of a square root, as a Div.

    Torch's `rsqrt` is exported as Sqrt and Reciprocal. ONNX Runtime finds RMS normalization by its division, and a decomposed one
    costs six passes over the activations instead of one.
    """
    for one, other in both_ways(node, "Mul"):
        root = origin(one, "Reciprocal")
        square = origin(root, "Sqrt")
        if root is None or square is None or not is_read_once(one) or not is_read_once(root):
            continue
        quotient = builder.node("Div", [other, root], hint=f"{node.name}/quotient")
        return EnablingChange(((node.outputs[0], quotient),), (other, square))
    return None


_RANK = 3


@enabling(
    "residual Adds kept apart from LayerNormalization (SkipLayerNormalization is slower on CPU)",
    "LayerNormalization",
    "separate-norm",
)
def as_separate_sum(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """An Add of float32 tensors of one shape that only a LayerNormalization looks at, as a Sum.

    ONNX Runtime makes one SkipLayerNormalization of Add and LayerNormalization wherever it can tell that both summands have one
    shape, which after a fused attention it can more often than before. Its kernel for the CPU computes a row number by number and
    takes four to seven times as long as the two (docs/decisions/0026). It does not look at Sum, which gives the same.
    """
    if node.inputs[0] is None:
        return None
    total, facts = node.inputs[0], builder.facts
    added = total.producer()
    if not is_standard(added, "Add") or not is_read_once(total):
        return None
    left, right = added.inputs
    dims = facts.dims(total)
    if left is None or right is None or dims is None or len(dims) != _RANK or facts.dtype(total) != ir.DataType.FLOAT:
        return None
    if facts.dims(left) != dims or facts.dims(right) != dims:
        return None
    builder.at(added)
    made = builder.node("Sum", [left, right], hint=f"{added.name}/sum")
    return EnablingChange(((total, made),), (left, right))


_PACKED, _RANKS = 2, {2, 3}


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A normalization along the last axis."""

    op: str
    summed: ir.Value
    weights: tuple[ir.Value, ...]
    epsilon: float
    result: ir.Value


@enabling("residual Adds fused with their normalization", "LayerNormalization Mul", "skip-norm")
def as_skip_norm(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """LayerNormalization, or decomposed RMS normalization, of a sum with other users.

    ONNX Runtime's own fusion wants a sum that nothing else looks at, as after each block of BERT. Where the normalization comes
    first, as nearly everywhere since, the sum goes on as the next residual: then the sum, the bias before it and the
    normalization are passes of their own.
    """
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
    fused = builder.node(norm.op, inputs, {"epsilon": norm.epsilon}, domain=CONTRIB, hint=f"{node.name}/{norm.op}", outputs=4)
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
        biased = own_bias(one, facts)
        if biased is not None:
            return biased, other
    return (left, None), right


def _layer_norm(node: ir.Node, facts: Facts) -> _Norm | None:
    if not is_standard(node, "LayerNormalization") or any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None
    total, *weights = node.inputs
    rank = facts.rank(total)
    if total is None or rank is None or attribute(node, "axis", -1) % rank != rank - 1 or attribute(node, "stash_type", 1) != 1:
        return None
    if not _is_shared(total, {node}, facts):
        return None
    kept = tuple(value for value in weights if value is not None)
    return _Norm("SkipLayerNormalization", total, kept, attribute(node, "epsilon", 1e-5), node.outputs[0])


def _rms_norm(node: ir.Node, facts: Facts) -> _Norm | None:
    """Decomposed RMS normalization, from the product with the weights."""
    norm = read_rms_norm(node.outputs[0], facts) if is_standard(node, "Mul") else None
    if norm is None or norm.weight is None or not _is_shared(norm.x, set(norm.inside), facts):
        return None
    if any(user not in norm.inside for item in norm.inside[1:] for value in item.outputs for user, _ in value.uses()):
        return None
    return _Norm("SkipSimplifiedLayerNormalization", norm.x, (norm.weight,), norm.epsilon, node.outputs[0])


def _is_shared(value: ir.Value, inside: set[ir.Node], facts: Facts) -> bool:
    """Whether others look at a value too; if nobody does, ONNX Runtime fuses by itself, but not on packed tokens."""
    return facts.rank(value) == _PACKED or value.is_graph_output() or any(user not in inside for user, _ in value.uses())


_WIDE = ir.DataType.FLOAT


@enabling(
    "float32 RMSNorms of half-precision values fused (ONNX Runtime 1.31 or newer)",
    "Cast",
    "wide-norms",
    since=branchwise_rms_norm.INFO.runtime,
)
def as_wide_norm(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A normalization in float32 that ends with the rounding `node`."""
    facts, result = builder.facts, node.outputs[0]
    norm = read_rms_norm(result, facts) if facts.dtype(result) in HALVES else None
    if norm is None or not _is_wide(norm, facts) or not _is_apart(norm):
        return None
    x, back = _before_turn(norm.x)
    dims = facts.dims(x)
    if dims is None or not (math.isfinite(norm.epsilon) and norm.epsilon > 0):
        return None
    if norm.weight is None:
        scaled = [user for user, _ in result.uses() if is_standard(user, "Mul")]
        if any(item is not None and item is not result and facts.rank(item) == 1 for user in scaled for item in user.inputs):
            return None  # factors in the type of x are still to come
    elif facts.dims(norm.weight) != dims[-1:]:
        return None
    made = builder.node(
        branchwise_rms_norm.INFO.name,
        [x, *([] if norm.weight is None else [norm.weight])],
        {"epsilon": norm.epsilon, "num_branches": 1},
        domain=CONTRIB,
        hint=f"{node.name}/{branchwise_rms_norm.INFO.name}",
    )
    if back is None:
        return EnablingChange(((result, made),), (x,))
    users = [user for user, _ in result.uses()]
    if len(users) == 1 and not result.is_graph_output() and _turns(users[0]) == [back.index(axis) for axis in range(len(back))]:
        return EnablingChange(((users[0].outputs[0], made),), (x,))
    return EnablingChange(((result, _turned(made, back, builder)),), (x,))


def _is_wide(norm: RmsNorm, facts: Facts) -> bool:
    """Whether all is computed in float32 from numbers of half precision, factors included."""
    between = norm.inside[1:]
    is_wide = all(facts.dtype(item.outputs[0]) == _WIDE for item in between)
    return is_wide and facts.dtype(norm.x) in HALVES and (norm.weight is None or facts.dtype(norm.weight) == _WIDE)


def _is_apart(norm: RmsNorm) -> bool:
    """Whether inner values have no other users, but for x in float32, which others may want too."""
    inside, wide = set(norm.inside), norm.inside[-1]
    return all(
        not value.is_graph_output() and all(user in inside for user, _ in value.uses())
        for item in norm.inside[1:]
        if item is not wide
        for value in item.outputs
    )


def _before_turn(x: ir.Value) -> tuple[ir.Value, list[int] | None]:
    """The normalized value before its axes were permuted, and the permutation; the last axis has to stay."""
    node = x.producer()
    perm = _turns(node)
    if node is None or perm is None or node.inputs[0] is None or perm[-1] != len(perm) - 1:
        return x, None
    return node.inputs[0], perm


def _turns(node: ir.Node | None) -> list[int] | None:
    """The permutation of a Transpose, as far as it is written."""
    return list(attribute(node, "perm", [])) or None if is_standard(node, "Transpose") else None


def _turned(value: ir.Value, perm: list[int], builder: Builder) -> ir.Value:
    """A value with its axes permuted; a view, where only axes of length 1 are."""
    dims = dims_of(builder, value)
    long = [axis for axis in perm if dims[axis] != 1]
    if long == sorted(long):
        return builder.reshape(value, [dims[axis] for axis in perm])
    return builder.transpose(value, perm)
