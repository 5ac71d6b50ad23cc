"""Softmax operators, the maxima subtracted in front of them, and sinks: one more column of scores without a value.

A maximum that is one number for all keys changes nothing. A sink is `softmax(concat(scores, sink))[..., :-1]`: it
comes after the scores or before them, and its weight is dropped by a Slice or a Split. The remaining share of the other
weights may be a factor instead, `softmax(scores) * sigmoid(logsumexp(scores) - sink)`.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, upward, varies_along
from onnx_attnfuse.attention.match.steps import Shifted
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of, read_part, softmax_axis


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A softmax over one axis."""

    node: ir.Node
    """The node it is known by."""
    scores: ir.Value
    weights: ir.Value
    axis: int
    nodes: tuple[ir.Node, ...]
    sink: ir.Value | None = None
    """One more score in each row, whose weight is dropped."""
    is_gated: bool = False
    """The weights are multiplied by the share that a sink leaves, so that a row of -inf is NaN."""


def find_softmax(node: ir.Node, facts: Facts, opset: int) -> Softmax | None:
    """Reads `node` as a softmax, or returns None."""
    if not is_standard(node, "Softmax") or not node.inputs or node.inputs[0] is None:
        return None
    axis = softmax_axis(node, facts, opset)
    return None if axis is None else Softmax(node, node.inputs[0], node.outputs[0], axis, (node,))


_PASSES = ("Cast", "Expand", "Identity", "Reshape", "Unsqueeze")


def maximum_of(scores: ir.Value, value: ir.Value | None, facts: Facts) -> tuple[ir.Node, ...]:
    """The nodes that make `value` a maximum of `scores`, the one that reduces last; none if it is something else.

    Along which axes is not looked at: see `is_one_for_all_keys`.
    """
    nodes: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        nodes.append(node)
        if is_standard(node, "ReduceMax"):
            return tuple(nodes) if node.inputs[0] is scores else ()
        value = _before(node, facts)
    return ()


def largest_of(step: Shifted, axes: Axes, facts: Facts) -> IndexedValue | None:
    """The maximum that is subtracted from scores laid out as `axes`, as it was reduced, before it is repeated for all keys."""
    found = aligned(step.largest, axes, facts)
    while found is not None and (node := found.value.producer()) is not None and not is_standard(node, "ReduceMax"):
        view, before = upward(found, facts), _before(node, facts)
        found = view or (None if before is None else IndexedValue(before, found.axes))
    return found


def is_one_for_all_keys(step: Shifted, axes: Axes, key_axis: Axis, facts: Facts) -> bool:
    """Whether the maximum that is subtracted from scores laid out as `axes` is the same for all keys of a row."""
    largest = largest_of(step, axes, facts)
    return largest is not None and not varies_along(largest, key_axis)


def _before(node: ir.Node, facts: Facts) -> ir.Value | None:
    """The value that a node repeats, casts, or takes the maximum of with -inf, as JAX begins one with."""
    if is_standard(node, "Max") and len(node.inputs) == 2:
        for value, other in (node.inputs, node.inputs[::-1]):
            if other is not None and facts.number(other) == -math.inf:
                return value
    return node.inputs[0] if is_standard(node, *_PASSES) else None


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Scores and a sink side by side."""

    scores: ir.Value
    sink: ir.Value
    first: int
    """The column at which the scores begin."""
    nodes: tuple[ir.Node, ...]


def with_sink(softmax: Softmax, facts: Facts) -> Softmax:
    """The softmax without the column of its sink, if it has one; else as it is."""
    joined = _joined(softmax, facts)
    kept = None if joined is None else _kept(softmax, joined, facts)
    if joined is None or kept is None:
        return _gated(softmax, facts)
    weights, nodes = kept
    nodes = (*joined.nodes, *softmax.nodes, *nodes)
    return dataclasses.replace(softmax, scores=joined.scores, weights=weights, nodes=nodes, sink=joined.sink)


def _joined(softmax: Softmax, facts: Facts) -> _Joined | None:
    """Scores and a sink before the softmax, and before their maximum is subtracted."""
    node, between = softmax.scores.producer(), tuple[ir.Node, ...]()
    if is_standard(node, "Sub") and node.inputs[0] is not None:
        between = (node, *maximum_of(node.inputs[0], node.inputs[1], facts))
        node = node.inputs[0].producer() if _is_of_rows(between[1:], softmax.axis, facts) else None
    if not is_standard(node, "Concat") or len(node.inputs) != 2:
        return None
    parts = [(value, facts.dims(value)) for value in node.inputs]
    for first, (scores, sink) in ((0, parts), (1, parts[::-1])):
        if scores[0] is None or sink[0] is None or scores[1] is None or sink[1] is None:
            continue
        if attribute(node, "axis", 0) % len(sink[1]) == softmax.axis and sink[1][softmax.axis] == 1 != scores[1][softmax.axis]:
            return _Joined(scores[0], sink[0], first, (node, *between[::-1]))
    return None


def _is_of_rows(maximum: tuple[ir.Node, ...], axis: int, facts: Facts) -> bool:
    """Whether a maximum is that of each row: the sink takes part in it."""
    value = maximum[-1].inputs[0] if maximum else None
    rank = facts.rank(value)
    return rank is not None and axes_of(maximum[-1], 1, rank, facts) == [axis]


def _kept(softmax: Softmax, joined: _Joined, facts: Facts) -> tuple[ir.Value, tuple[ir.Node, ...]] | None:
    """The weights of the scores, and the nodes that drop that of the sink."""
    value, found = softmax.weights, list[ir.Node]()
    rank, dims = facts.rank(value), facts.dims(joined.scores)
    while rank is not None and dims is not None:
        users = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if len(users) != 1 or value.is_graph_output():
            return None
        found.append(users[0])
        if users[0].op_type not in {"Cast", "Identity"}:
            break
        value = users[0].outputs[0]
    if not found or rank is None:
        return None
    kept = _cut(found[-1], softmax.axis, joined, facts)
    return (kept, tuple(found)) if kept is not None and facts.dims(kept) == dims else None


def _cut(node: ir.Node, axis: int, joined: _Joined, facts: Facts) -> ir.Value | None:
    """The columns of the scores, which are all that a node cuts out; that they are as many is for the caller to see."""
    kept = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    part = read_part(kept[0], facts) if len(kept) == 1 else None
    is_ours = part is not None and (part.axis, part.step) == (axis, 1) and facts.same(part.start, joined.first)
    return kept[0] if is_ours else None


def _gated(softmax: Softmax, facts: Facts) -> Softmax:
    """The softmax with the factor of a sink, if its weights are multiplied by one; else as it is."""
    users = [node for node, _ in softmax.weights.uses() if node.op_type != "Shape"]
    if len(users) != 1 or not is_standard(users[0], "Mul") or softmax.weights.is_graph_output():
        return softmax
    (product,), nodes = users, list[ir.Node]()
    value = next((value for value in product.inputs if value is not softmax.weights), None)
    for op in ("Sigmoid", "Sub"):
        node = None if value is None else value.producer()
        if not is_standard(node, op):
            return softmax
        nodes.append(node)
        value = node.inputs[0]
    total, sink = nodes[-1].inputs
    logarithm = () if total is None else _logarithm(total, softmax, facts)
    same = total is not None and facts.dims(total) == facts.dims(nodes[-1].outputs[0]) is not None
    if sink is None or not logarithm or not same or facts.dims(product.outputs[0]) != facts.dims(softmax.weights):
        return softmax
    own = (*softmax.nodes, *logarithm, *nodes[::-1], product)
    return dataclasses.replace(softmax, weights=product.outputs[0], nodes=own, sink=sink, is_gated=True)


def _logarithm(value: ir.Value, softmax: Softmax, facts: Facts) -> tuple[ir.Node, ...]:
    """The nodes of the logarithm of the sum of a softmax's exponentials; none if it is something else."""
    node, rest = value.producer(), tuple[ir.Node, ...]()
    reduced = softmax.scores
    if is_standard(node, "Log") and facts.assumed.finite_exponentials and node.inputs[0] is not None:
        rest, node = (node,), node.inputs[0].producer()
        inner = None if node is None or node.inputs[0] is None else node.inputs[0].producer()
        if not is_standard(node, "ReduceSum") or not is_standard(inner, "Exp") or inner.inputs[0] is not reduced:
            return ()
        rest, reduced = (*rest, inner), inner.outputs[0]
    elif not is_standard(node, "ReduceLogSumExp"):
        return ()
    rank = facts.rank(softmax.scores)
    if rank is None or node.inputs[0] is not reduced or not attribute(node, "keepdims", 1):
        return ()
    return (*rest, node) if axes_of(node, 1, rank, facts) == [softmax.axis % rank] else ()
