"""Scaling: `scores * c`, `scores / c`, `-scores`.

    Q·Kᵀ ── Mul/Div ── Softmax        the factor may be a number, computed, or differ by head or row

Written by every exporter; the same step on q or k is read with the operands, not here.
Safety: a factor that differs by key is no scale; the walk refuses it.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps


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
