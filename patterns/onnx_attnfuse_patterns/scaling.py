"""Scaling: `scores * c`, `scores / c`, `-scores`.

    Q·Kᵀ ── Mul/Div ── Softmax        the factor may be a number, computed, or differ by head or row

Written by every exporter; the same step on q or k is read with the operands, not here.
After Softmax a factor that is the same for all keys (head_mask of old exports, gates) goes to the result.
Safety: a factor that differs by key is no scale; the walk refuses it.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps, weight_step


@score_step("Mul")
def multiply(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`scores * c` or `c * scores`."""
    left, right = node.inputs
    if left is None or right is None:
        return ()
    if facts.number(right) is not None:
        return (steps.Scaled(left, right),)
    if facts.number(left) is not None:
        return (steps.Scaled(right, left),)
    return steps.Scaled(left, right), steps.Scaled(right, left)


@score_step("Div")
def divide(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`scores / c`."""
    left, right = node.inputs
    return (steps.Scaled(left, right, divide=True),) if left is not None and right is not None else ()


@score_step("Neg")
def negate(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`-scores`."""
    return (steps.Negated(node.inputs[0]),) if node.inputs[0] is not None else ()


@weight_step("Mul", "Div")
def weigh(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """`weights * g` or `weights / g`: a gate, a mask of heads or rows, or the weights' own sum."""
    own = steps.renormalized(node, weights, facts)
    if own is not None:
        return own
    left, right = node.inputs
    if left is weights and right is not None:
        return steps.Weighted(node.outputs[0], right, divide=node.op_type == "Div")
    if right is weights and left is not None and node.op_type == "Mul":
        return steps.Weighted(node.outputs[0], left)
    return None
