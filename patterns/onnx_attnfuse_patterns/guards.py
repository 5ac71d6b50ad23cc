"""What is done to rows without a legal key, after Softmax.

    Softmax ── IsNaN ── Where(·, 0, weights) ── ·V        torch's scaled_dot_product_attention: such rows give 0
    Softmax ── Where(mask, 0, weights) ── ·V              DeBERTa's XSoftmax: masked weights are 0, so such rows give 0

Safety: the guard is part of the meaning; it is never dropped unless no such row can occur.
"""

import onnx_ir as ir

from onnx_attnfuse import Facts, steps, weight_step


@weight_step("IsNaN")
def nan_test(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """`where(isnan(weights), 0, weights)`, met at its test."""
    for user, index in node.outputs[0].uses():
        if user.op_type == "Where" and index == 0 and user.inputs[2] is weights and _is_zero(user.inputs[1], facts):
            return steps.NaNZeroed(user.outputs[0], also=(user,))
    return None


@weight_step("Where")
def where(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """`where(isnan(weights), 0, weights)`, `where(c, weights, 0)` or `where(c, 0, weights)`."""
    condition, chosen, other = node.inputs
    if condition is None:
        return None
    test = condition.producer()
    if test is not None and test.op_type == "IsNaN" and test.inputs[0] is weights and other is weights:
        return steps.NaNZeroed(node.outputs[0], also=(test,)) if _is_zero(chosen, facts) else None
    if chosen is weights and _is_zero(other, facts):
        return steps.Zeroed(node.outputs[0], condition, keep_where=True)
    if other is weights and _is_zero(chosen, facts):
        return steps.Zeroed(node.outputs[0], condition, keep_where=False)
    return None


def _is_zero(value: ir.Value | None, facts: Facts) -> bool:
    return value is not None and facts.number(value) == 0
