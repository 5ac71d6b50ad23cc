"""A sink: one more column of scores that takes weight and has no value, `softmax(concat(scores, sink))[..., :-1]`.

It comes after the scores or before them, and its weight is dropped by a Slice or a Split. The remaining share of the other
weights may be a factor instead, `softmax(scores) * sigmoid(logsumexp(scores) - sink)`.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.match.softmax import Softmax, maximum_of
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of, slice_bounds


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
    parts = [(value, None if value is None else facts.dims(value)) for value in node.inputs]
    for first, (scores, sink) in ((0, parts), (1, parts[::-1])):
        if scores[0] is None or sink[0] is None or scores[1] is None or sink[1] is None:
            continue
        if attribute(node, "axis", 0) % len(sink[1]) == softmax.axis and sink[1][softmax.axis] == 1 != scores[1][softmax.axis]:
            return _Joined(scores[0], sink[0], first, (node, *between[::-1]))
    return None


def _is_of_rows(maximum: tuple[ir.Node, ...], axis: int, facts: Facts) -> bool:
    """Whether a maximum is that of each row: the sink takes part in it."""
    value = maximum[-1].inputs[0] if maximum else None
    rank = None if value is None else facts.rank(value)
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
    kept = _sliced(found[-1], rank, softmax.axis, joined, facts) or _split(found[-1], rank, softmax.axis, joined)
    return (kept, tuple(found)) if kept is not None and facts.dims(kept) == dims else None


def _sliced(node: ir.Node, rank: int, axis: int, joined: _Joined, facts: Facts) -> ir.Value | None:
    """The columns of the scores cut out by a Slice; that they are as many is for the caller to see."""
    bounds = slice_bounds(node, rank, facts) if is_standard(node, "Slice") else None
    fits = [start == (joined.first if at == axis else 0) and step == 1 for at, (start, _, step) in (bounds or {}).items()]
    return node.outputs[0] if fits and all(fits) else None


def _split(node: ir.Node, rank: int, axis: int, joined: _Joined) -> ir.Value | None:
    """The columns of the scores as one of two parts, the other unused."""
    if not is_standard(node, "Split") or len(node.outputs) != 2 or attribute(node, "axis", 0) % rank != axis:
        return None
    kept, other = node.outputs if joined.first == 0 else node.outputs[::-1]
    return None if other.uses() or other.is_graph_output() else kept


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
