"""Masks and biases: `scores + m`, `scores - m`, `where(c, scores, fill)`.

    Q·Kᵀ ── Add ── Softmax            m of any shape that broadcasts
    Q·Kᵀ ── Where ── Softmax          in both senses; fill is one number

Safety: which addend is the score is found by walking both; a fill that is an ordinary number (-10, say) is refused by the engine.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps


@score_step("Add")
def add(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`scores + m` or `m + scores`."""
    left, right = node.inputs
    return (steps.Added(left, right), steps.Added(right, left)) if left is not None and right is not None else ()


@score_step("Sub")
def subtract(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`scores - m`; `m` may be the scores' own maximum, which Softmax does not see if it is one for all keys."""
    left, right = node.inputs
    if left is None or right is None:
        return ()
    maximum = steps.maximum_of(left, right, facts)
    if maximum:
        return (steps.Shifted(left, right, also=maximum),)
    return (steps.Added(left, right, negative=True),)


@score_step("Where")
def where(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`where(c, scores, fill)` or `where(c, fill, scores)`."""
    condition, chosen, other = node.inputs
    if condition is None or chosen is None or other is None:
        return ()
    for scores, filled, keep_where in ((chosen, other, True), (other, chosen, False)):
        fill = facts.number(filled)
        if fill is not None:
            return (steps.Replaced(scores, condition, keep_where, fill),)
    return ()
