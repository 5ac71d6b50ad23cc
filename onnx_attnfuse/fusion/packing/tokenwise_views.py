"""The rules of operators that rearrange, take or join the channels of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.packing.token_axes import Marks, Tokens, count_of, others, through
from onnx_attnfuse.fusion.packing.tokenwise import Rule, Step, clone_on_packed, int_attribute, packed_axis, refusal
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, constant_array
from onnx_attnfuse.graph.rules.reading import slice_bounds
from onnx_attnfuse.reasons import Reason


def view(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """The step of an operator that regroups or permutes axes, those of tokens staying together."""
    first, output = node.inputs[0], node.outputs[0]
    other = through(node, value, marks, tokens)
    dims = tokens.facts.dims(output)
    if first is None or other is None or dims is None:
        return refusal(node, "mixes tokens with channels")
    before, after = (marks, other) if value is first else (other, marks)
    if not tokens.is_full(first, before) or not tokens.is_full(output, after):
        return refusal(node, "mixes tokens with channels")

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        if node.op_type == "Transpose":
            perm: list[int] = attribute(node, "perm") or [*range(len(before))][::-1]
            places = [packed_axis(before, axis) for axis in perm]
            return [builder.transpose(packed[0], [0, *(place for place in places if place is not None)])]
        return [builder.reshape(packed[0], (count_of(packed[0], builder.facts), *others(after, dims)))]

    return Step(node, {0: before}, (after,), build)


def _split(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    axis = packed_axis(marks, int_attribute(node, "axis", 0))
    first = node.inputs[0]
    if axis is None or first is None or not tokens.is_full(first, marks):
        return refusal(node, "splits positions")
    outputs = (marks,) * len(node.outputs)

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        return clone_on_packed(node, builder, [packed[0], *node.inputs[1:]], outputs, packed[0], axis=axis)

    return Step(node, {0: marks}, outputs, build)


def _concat(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    axis = packed_axis(marks, int_attribute(node, "axis", 0))
    if axis is None or not all(item is not None and tokens.is_full(item, marks) for item in node.inputs):
        return refusal(node, "joins positions, or tokens with something else")

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        return clone_on_packed(
            node, builder, [packed[place] for place in range(len(node.inputs))], (marks,), packed[0], axis=axis
        )

    return Step(node, dict.fromkeys(range(len(node.inputs)), marks), (marks,), build)


def _slice(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    first = node.inputs[0]
    bounds = slice_bounds(node, len(marks), tokens.facts)
    if bounds is None or first is None or not tokens.is_full(first, marks):
        return refusal(node, "takes a part that is not known")
    taken = [(packed_axis(marks, axis), *bound) for axis, bound in bounds.items()]
    parts = [
        [axis, start, end, step]
        for axis, start, end, step in taken
        if axis is not None and isinstance(start, int) and isinstance(end, int)
    ]
    if len(parts) < len(taken):
        return refusal(node, "takes some of the positions")

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        axes, starts, ends, steps = (builder.constant([int(item) for item in column]) for column in zip(*parts, strict=True))
        return clone_on_packed(
            node, builder, [packed[0], starts, ends, axes, steps], (marks,), packed[0], axes=None, starts=None, ends=None
        )

    return Step(node, {0: marks}, (marks,), build)


def _gather(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """Channels chosen by constants."""
    first, index = node.inputs[0], constant_array(node.inputs[1])
    rank = None if first is None else tokens.facts.rank(first)
    if first is None or rank is None or index is None:
        return refusal(node, "chooses by an index that is not constant")
    axis = int_attribute(node, "axis", 0) % rank
    own = marks if value is first else (*marks[:axis], "", *marks[axis + index.ndim :])
    place = packed_axis(own, axis)
    if len(own) != rank or place is None or not tokens.is_full(first, own):
        return refusal(node, "chooses positions")
    after = (*own[:axis], *("",) * index.ndim, *own[axis + 1 :])

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        return clone_on_packed(node, builder, [packed[0], node.inputs[1]], (after,), packed[0], axis=place)

    return Step(node, {0: own}, (after,), build)


VIEWS: Rule = view
CHANNELS: dict[str, Rule] = {"Concat": _concat, "Gather": _gather, "Slice": _slice, "Split": _split}
