"""Sinks in the forms that are read: a column beside the scores, and a factor of the weights.

(weights @ v) * share                         is    (weights * share) @ v                     a factor of the result
Unsqueeze(f(ReduceLogSumExp(scores), sink))   is    f(ReduceLogSumExp<keepdims = 1>(scores), Unsqueeze(sink))
Pad(scores, one column of c)                  is    Concat(scores, c)                         a sink that is one number
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import uncast
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.fusion.enabling.key_blocks import below
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.facts_view import broadcast
from onnx_attnfuse.graph.ops import ELEMENTWISE, REDUCTIONS
from onnx_attnfuse.graph.rules.reading import axes_of, int_list


def with_factor_inside(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """A factor of the rows of the weights, or of their product with values, as a factor right after the softmax."""
    facts, weights = builder.facts, softmax.weights
    dims, same = facts.dims(weights), [value for value in below(weights) if uncast(value, facts) is weights]
    products = [node for value in same for node, place in value.uses() if is_standard(node, "MatMul") and place == 0]
    for plain, values in [(value, None) for value in same] + [(node.outputs[0], node.inputs[1]) for node in products]:
        users = [node for node, _ in plain.uses() if node.op_type != "Shape"]
        if len(users) != 1 or not is_standard(users[0], "Mul") or facts.dims(users[0].outputs[0]) != facts.dims(plain):
            continue
        factor = next((item for item in users[0].inputs if item is not plain), None)
        lengths = facts.dims(factor)
        if factor is None or not lengths or lengths[-1] != 1 or broadcast([lengths, dims]) != dims:
            continue
        builder.at(users[0])
        ends = [weights] if values is None else [weights, values]
        made = builder.elementwise("Mul", [weights, _in_columns(factor, ends, builder)])
        made = made if values is None else builder.node("MatMul", [made, values])
        return EnablingChange(((users[0].outputs[0], made),), tuple(dict.fromkeys(ends)))
    return None


def _in_columns(value: ir.Value, ends: list[ir.Value], builder: Builder) -> ir.Value:
    """A value whose last axis is 1, which sums that dropped it keep from the start; what it is made of is added to `ends`."""
    facts = builder.facts
    shown = uncast(value, facts)
    node, dims = shown.producer(), facts.dims(shown)
    before = given(node, 0) if is_standard(node, "Reshape", "Unsqueeze") else None
    if before is None or dims is None or (facts.dims(before), dims[-1:]) != (dims[:-1], (1,)):
        ends.append(value)
        return value
    return _with_column(before, ends, builder)


def _with_column(value: ir.Value, ends: list[ir.Value], builder: Builder) -> ir.Value:
    """A value with one more axis of length 1 at its end, added above elementwise operators and kept by a reduction."""
    facts = builder.facts
    shown = uncast(value, facts)
    node, dims = shown.producer(), facts.dims(shown)
    if dims == ():
        return value
    source = None if node is None else given(node, 0)
    longer = facts.dims(source)
    if is_standard(node, *ELEMENTWISE) and all(item is not None and facts.dims(item) is not None for item in node.inputs):
        inputs = [_with_column(item, ends, builder) for item in node.inputs if item is not None]
        return builder.elementwise(node.op_type, inputs)
    if is_standard(node, *REDUCTIONS) and source is not None and longer and not attribute(node, "keepdims", 1):
        last = len(longer) - 1
        if axes_of(node, 1, len(longer), facts) == [last] and dims == longer[:-1]:
            ends.append(source)
            return builder.reduce(node.op_type, source, [last])
    ends.append(value)
    return builder.reshape(value, [*(dims or ()), 1])


def with_column_joined(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """One column that scores are padded by, joined to them."""
    padded, facts = softmax.scores, builder.facts
    node = padded.producer()
    scores = given(node, 0) if is_standard(node, "Pad") else None
    dims, pads = facts.dims(scores), None if node is None else int_list(node, 1, "pads", facts)
    if node is None or scores is None or dims is None or pads is None or attribute(node, "mode", "constant") != "constant":
        return None
    axis, rank = softmax.axis % len(dims), len(dims)
    columns = [place for place, pad in enumerate(pads) if pad != 0]
    if len(pads) != 2 * rank or columns not in ([axis], [axis + rank]) or pads[columns[0]] != 1 or given(node, 3) is not None:
        return None
    number = given(node, 2) or builder.scalar(0.0, facts.dtype(scores))
    sink = builder.reshape(number, [1] * rank)
    joined = builder.joined([sink, scores] if columns == [axis] else [scores, sink], axis)
    return None if joined is None else EnablingChange(((padded, joined),), (scores,))
