"""Guards after Softmax: the treatment of rows without a legal key.

    Softmax ── IsNaN ── Where(·, 0, weights) ── ·V        torch's scaled_dot_product_attention: such rows give 0
    Softmax ── Equal(w, w) ── Where(·, weights, 0)        the same, as NaN alone is not equal to itself
    Softmax ── Where(max(scores) > low, weights, 0)       rows of which every score is as low as what masks
    Softmax ── Where(mask, 0, weights) ── ·V              DeBERTa's XSoftmax: masked weights are 0, so such rows give 0
    Softmax ── Where(max(scores) < -104, NaN, weights)    what exponentials give whose maximum is not subtracted first
    Softmax ── Where(IsInf(weights) & weights > 0, 3.4e38, weights)     the rest of nan_to_num, as no weight is infinite

Safety: the guard is part of the meaning; it is never dropped unless no such row can occur.
"""

import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse import Facts, steps, weight_step

_MIRRORED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual", "Less": "Greater", "LessOrEqual": "GreaterOrEqual"}


@weight_step("Equal", "IsNaN")
def nan_test(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """`where(isnan(weights), 0, weights)`, met at its test, or `where(weights == weights, weights, 0)`."""
    tests = [node.outputs[0], *(user.outputs[0] for user, _ in node.outputs[0].uses() if user.op_type == "Not")]
    for user, index in (use for test in tests for use in test.uses()):
        if user.op_type == "Where" and index == 0 and (guard := _nan_guard(user, weights, facts)) is not None:
            return steps.NaNZeroed(user.outputs[0], also=(*guard, user))
    return None


def _nan_guard(node: ir.Node, weights: ir.Value, facts: Facts) -> tuple[ir.Node, ...] | None:
    """The nodes of the test by which a Where makes weights 0 where they are NaN; None if it does something else."""
    condition, chosen, other = node.inputs
    test, turned = _tests(condition)
    if test is None or test.op_type not in {"Equal", "IsNaN"} or test.inputs[0] is not test.inputs[-1]:
        return None
    is_where = (test.op_type == "IsNaN") != (len(turned) % 2 == 1)
    filled, kept = (chosen, other) if is_where else (other, chosen)
    once_more = steps.same_rounded(test.inputs[0], weights, facts)
    if kept is not weights or once_more is None or not _is_zero(filled, facts):
        return None
    return (*once_more, test, *turned)


def _tests(condition: ir.Value | None) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """The node that computes a condition, None if there is none, and each Not after it."""
    node = None if condition is None else condition.producer()
    if node is None or node.domain not in {"", "ai.onnx"}:
        return None, ()
    if node.op_type != "Not" or node.inputs[0] is None:
        return node, ()
    test, turned = _tests(node.inputs[0])
    return test, (*turned, node)


def _low_guard(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.LowZeroed | None:
    """The step of a Where that zeroes weights of rows whose largest score is a number or less; None if it is something else."""
    condition, chosen, other = node.inputs
    test, turned = _tests(condition)
    softmax = weights.producer()
    if test is None or test.op_type not in _MIRRORED or softmax is None or softmax.op_type != "Softmax":
        return None
    for largest, number, op in ((*test.inputs, test.op_type), (*test.inputs[::-1], _MIRRORED[test.op_type])):
        top = None if largest is None else largest.producer()
        bound = facts.number(number)
        if largest is None or top is None or bound is None or top.op_type != "ReduceMax":
            continue
        kept, filled = (chosen, other) if op.startswith("Greater") != (len(turned) % 2 == 1) else (other, chosen)
        if top.inputs[0] is not softmax.inputs[0] or kept is not weights or not _is_zero(filled, facts):
            return None
        if op in {"GreaterOrEqual", "Less"}:
            bound = float(np.nextafter(np.float32(bound), np.float32(-np.inf)))
        return steps.LowZeroed(node.outputs[0], largest, bound, (top, test, *turned))
    return None


@weight_step("Where")
def where(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """`where(isnan(weights), 0, weights)`, `where(c, weights, 0)` or `where(c, 0, weights)`."""
    condition, chosen, other = node.inputs
    if condition is None:
        return None
    test, guard = condition.producer(), _nan_guard(node, weights, facts)
    if guard is not None:
        return steps.NaNZeroed(node.outputs[0], also=guard)
    low = _low_guard(node, weights, facts)
    if low is not None:
        return low
    if chosen is not None and other is weights and test is not None and not math.isfinite(number := facts.number(chosen) or 0.0):
        also = _no_exponential(test, weights, facts)
        return steps.Voided(node.outputs[0], also, defined=math.isnan(number)) if also else None
    if other is weights and (never := _tests_of_infinity(condition, weights)):
        return steps.Kept(node.outputs[0], never)
    if chosen is weights and _is_zero(other, facts):
        return steps.Zeroed(node.outputs[0], condition, keep_where=True)
    if other is weights and _is_zero(chosen, facts):
        return steps.Zeroed(node.outputs[0], condition, keep_where=False)
    return None


def _tests_of_infinity(test: ir.Value, weights: ir.Value) -> tuple[ir.Node, ...]:
    """The nodes of a test that holds for infinite weights only, of these or before guards; none if it is another."""
    before, value = [weights], weights
    while (node := value.producer()) is not None and node.op_type in {"Cast", "Identity", "Where"}:
        inner = node.inputs[-1]
        if inner is None:
            break
        before.append(value := inner)
    nodes: dict[ir.Node, None] = {}
    pending = [test]
    for item in pending:
        node = item.producer()
        if node is None or item in before or node.op_type not in {"And", "Cast", "Greater", "IsInf", "Less"}:
            continue
        nodes[node] = None
        pending += [value for value in node.inputs if value is not None]
    ends = {value for node in nodes for value in node.inputs if value is not None and value.producer() not in nodes}
    both = test.producer()
    parts = both.inputs if both is not None and both.op_type == "And" else (test,)
    infinite = any(_is_infinite(value) for value in parts)
    known = all(value in before or value.const_value is not None or _is_constant(value) for value in ends)
    return tuple(reversed(nodes)) if infinite and known else ()


def _is_infinite(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "IsInf"


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Constant"


def _no_exponential(test: ir.Node, weights: ir.Value, facts: Facts) -> tuple[ir.Node, ...]:
    """The nodes of `max(scores) < -104` for the scores that `weights` are the softmax of; none if it is something else."""
    softmax, bound = weights.producer(), test.inputs[1] if test.op_type == "Less" else None
    top = test.inputs[0].producer() if bound is not None and test.inputs[0] is not None else None
    if bound is None or top is None or softmax is None or facts.number(bound) != steps.NO_EXPONENTIAL:
        return ()
    same = top.op_type == "ReduceMax" and softmax.op_type == "Softmax" and top.inputs[0] is softmax.inputs[0]
    return (test, top) if same else ()


def _is_zero(value: ir.Value | None, facts: Facts) -> bool:
    return value is not None and facts.number(value) == 0
