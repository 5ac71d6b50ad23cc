"""A sink: one more column of scores that takes weight and has no value, `softmax(concat(scores, sink))[..., :-1]`."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of, slice_bounds
from onnx_attnfuse.graph.uses import producer_of


def with_sink(softmax: Softmax, facts: Facts) -> Softmax:
    """The softmax without its last column, if that is a sink; else as it is."""
    above = _appended(softmax, facts)
    below = None if above is None else _dropped(softmax, above.inputs[0], facts)
    if above is None or below is None:
        return softmax
    scores, sink = above.inputs
    assert scores is not None
    between = _shifts(softmax.scores, above.outputs[0], facts)
    nodes = (above, *between, *softmax.nodes, *below)
    return dataclasses.replace(softmax, scores=scores, weights=below[-1].outputs[0], nodes=nodes, sink=sink)


def _appended(softmax: Softmax, facts: Facts) -> ir.Node | None:
    """The Concat that appends one column to the scores, behind differences that a softmax does not see."""
    value = softmax.scores
    node = value.producer()
    if node is not None and node.op_type == "Sub" and _is_shift(node, softmax.axis, facts) and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if not is_standard(node, "Concat") or len(node.inputs) != 2:
        return None
    dims = None if node.inputs[1] is None else facts.dims(node.inputs[1])
    if dims is None or attribute(node, "axis", 0) % len(dims) != softmax.axis or dims[softmax.axis] != 1:
        return None
    return node


def _is_shift(node: ir.Node, axis: int, facts: Facts) -> bool:
    """Whether the largest score of each row is subtracted from it."""
    value, shift = node.inputs
    most = None if shift is None else shift.producer()
    if value is None or most is None or most.op_type != "ReduceMax" or most.inputs[0] is not value:
        return False
    rank = facts.rank(value)
    return rank is not None and axes_of(most, 1, rank, facts) == [axis] and bool(attribute(most, "keepdims", 1))


def _shifts(value: ir.Value, appended: ir.Value, facts: Facts) -> list[ir.Node]:
    """The nodes between the appended scores and the softmax."""
    if value is appended:
        return []
    node = producer_of(value)
    assert node.inputs[1] is not None
    return [item for item in (node.inputs[1].producer(), node) if item is not None]


def _dropped(softmax: Softmax, scores: ir.Value | None, facts: Facts) -> list[ir.Node] | None:
    """The nodes from the softmax to the Slice that drops its last column."""
    value, found = softmax.weights, list[ir.Node]()
    rank = facts.rank(value)
    total = None if scores is None else facts.dims(scores)
    while rank is not None and total is not None:
        users = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if len(users) != 1 or value.is_graph_output():
            return None
        found.append(users[0])
        if users[0].op_type not in {"Cast", "Identity"}:
            break
        value = users[0].outputs[0]
    if not found or not is_standard(found[-1], "Slice") or rank is None:
        return None
    bounds = slice_bounds(found[-1], rank, facts) or {}
    from_first = all(start == 0 and step == 1 for start, _, step in bounds.values())
    return found if bounds and from_first and facts.dims(found[-1].outputs[0]) == total else None
