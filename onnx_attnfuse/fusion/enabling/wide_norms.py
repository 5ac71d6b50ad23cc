"""RMS normalization in half precision with factors in float32, or with none, as com.microsoft BranchwiseRMSNorm.

    x ── Cast ── x / sqrt(mean(x²) + ε) ── Mul(w) ── Cast        becomes        x ── BranchwiseRMSNorm(w)

So Gemma has it, whose factors are `1 + w` in float32, and inputs normalized without factors. ONNX Runtime fuses the middle, if
that is not heads after a Transpose, and the casts stay. With factors in x's own type it fuses all by itself.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.operators import branchwise_rms_norm
from onnx_attnfuse.targets.rms_norm import RmsNorm, read_rms_norm

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
    dims = builder.facts.dims(value)
    assert dims is not None
    long = [axis for axis in perm if dims[axis] != 1]
    if long == sorted(long):
        return builder.reshape(value, [dims[axis] for axis in perm])
    return builder.transpose(value, perm)
