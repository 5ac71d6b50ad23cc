"""Operators that change nothing in inference: Cast between float types, Identity, Dropout, whole slices, weights and 0.

    Q·Kᵀ ── Cast(float32) ── Softmax ── Cast(float16) ── ·V
    Softmax ── Mul(mask) ── Add(0 · not mask) ── ·V         tf2onnx: where(mask, weights, 0)

Exporters cast around Softmax when the model asks for a wider softmax; fused kernels accumulate in float32 anyway.
Safety: a cast to another type than a float, or to one not known, is not read, and one that loses digits is refused once the
attention is whole (`narrowed-scores`, `narrowed-weights`); Dropout passes only when its training input is absent or false.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps, weight_step

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


def _passes(node: ir.Node, facts: Facts) -> bool:
    if node.op_type in {"Cast", "CastLike"}:
        return facts.dtype(node.outputs[0]) in _FLOATS
    if node.op_type == "Slice":
        return steps.is_whole(node, facts)
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        return facts.number(node.inputs[2]) == 0
    return True


@score_step("Cast", "CastLike", "Identity", "Dropout", "Slice")
def pass_scores(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """The scores, unchanged."""
    return (steps.Passed(node.inputs[0]),) if node.inputs[0] is not None and _passes(node, facts) else ()


@weight_step("Cast", "CastLike", "Identity", "Dropout", "Slice")
def pass_weights(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """The weights, unchanged."""
    return steps.Kept(node.outputs[0]) if node.inputs[0] is weights and _passes(node, facts) else None


@weight_step("Add")
def add_nothing(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """`weights + 0`, either way round, in their own shape."""
    left, right = node.inputs
    other = right if left is weights else left
    same = facts.dims(node.outputs[0]) == facts.dims(weights) is not None
    return steps.Kept(node.outputs[0]) if same and other is not None and facts.number(other) == 0 else None
