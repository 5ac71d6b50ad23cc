"""Token-wise operators, which compute every token by itself, and how each runs on packed tokens: `read_step`.

The axes of entries and positions of a batch are among those that such an operator goes along (`graph/along.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.packing.tokens import Tokens, through
from onnx_attnfuse.graph.along import Along, Marks, again, along
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import given, is_standard
from onnx_attnfuse.graph.ops import REARRANGES
from onnx_attnfuse.reasons import Reason


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A node that computes every token by itself."""

    node: ir.Node
    marks: Mapping[int, Marks]
    """The inputs of the node that consist of tokens, by place, and their marks."""
    outputs: tuple[Marks, ...]
    """The marks of its outputs."""
    beside: Collection[int] = ()
    """The places of other inputs that broadcast against tokens."""

    def inputs(self) -> list[tuple[ir.Value, Marks]]:
        """The inputs that consist of tokens."""
        found = [(self.node.inputs[place], marks) for place, marks in self.marks.items()]
        return [(value, marks) for value, marks in found if value is not None]

    def free(self) -> list[ir.Value]:
        """The inputs that are the same for all tokens."""
        return [value for place, value in enumerate(self.node.inputs) if value is not None and place not in self.marks]

    def on_packed(self, builder: Builder, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """The outputs for packed tokens, which take the place of `inputs`."""
        given, hint = dict(zip(self.marks, operands, strict=True)), f"{self.node.name or self.node.op_type}/packed"
        return again(self.node, given, builder, self.marks.get(0, ()), self.outputs, self.beside, hint)


_LOOKS_UP, _PRODUCTS = ("Gather", "RotaryEmbedding"), ("FusedMatMul", "Gemm", "MatMul")
"""Operators of which the second input may consist of tokens where these are on axes of their own."""


def read_step(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens, *, in_place: bool = False) -> Step | Reason:
    """The step of a node that computes every token by itself, or the reason why it may not.

    Args:
        node: The node.
        value: A value of the node, its output or an input.
        marks: The marks of that value.
        tokens: The sizes of the batch.
        in_place: Whether tokens keep their axes, so that they may be columns, or the places of rows of tables.
    """
    read = _read(node, value, marks, tokens)
    if not isinstance(read, str):
        read = _checked(node, *read, tokens)
    if not isinstance(read, str) and value in read.free():
        read = "has tokens as something that is the same for all"
    if not isinstance(read, str) and not in_place:
        read = _beside_others(read, tokens)
    return Reason("not-position-wise", f"{node.op_type} {read}", node.name) if isinstance(read, str) else read


def _beside_others(step: Step, tokens: Tokens) -> Step | str:
    """A step whose tokens may become one axis in front, or why they may not."""
    op, second = step.node.op_type, given(step.node, 1)
    if op in _LOOKS_UP and 1 in step.marks:
        return "chooses by an index that is not constant"
    if op in _PRODUCTS and (1 in step.marks or (second is not None and tokens.facts.rank(second) != 2)):
        return "is no product of channels with a matrix"
    return step


def _read(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> tuple[Mapping[int, Marks], Marks] | str:
    """The marks of inputs and outputs by those of one value, or why there are none."""
    axes = along(node, tokens.facts)
    if isinstance(axes, str):
        return axes
    if is_standard(node, *REARRANGES):
        other = through(node, value, marks, tokens)
        if other is None:
            return "mixes tokens with channels"
        return ({0: other}, marks) if value in node.outputs else ({0: marks}, other)
    width = tokens.facts.rank(node.outputs[0]) or 0
    if value in node.outputs:
        after = marks
    else:
        after = next((_beyond(own, marks, width) for at, own in axes.items() if given(node, at) is value), None)
    if after is None or len(after) != width:
        return "does not keep positions apart"
    return {at: tuple("" if axis is None else after[axis] for axis in own) for at, own in axes.items()}, after


def _checked(node: ir.Node, before: Mapping[int, Marks], after: Marks, tokens: Tokens) -> Step | str:
    """The step of a node, or why inputs and outputs are not what their marks say."""
    found, beside = dict[int, Marks](), list[int]()
    for place, marks in before.items():
        if (item := given(node, place)) is None:
            continue
        if not tokens.fits(item, marks):
            return f"combines tokens with '{item.name}', which has another shape"
        if any(mark and dim != 1 for mark, dim in zip(reversed(marks), reversed(tokens.facts.dims(item) or ()), strict=False)):
            found[place] = marks
        elif _is_whole(marks):
            beside.append(place)
    is_used = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    count = len(node.outputs) if is_used or node.op_type == "Split" else 1
    if not found or not all(map(_is_whole, (after, *found.values()))):
        return "does not keep positions apart"
    if not all(tokens.is_full(output, after) for output in node.outputs[:count]):
        return "has outputs of another shape"
    return Step(node, found, (after,) * count, beside)


def _is_whole(marks: Marks) -> bool:
    return sorted("".join(marks)) == ["b", "s"]


def _beyond(axes: Along, marks: Marks, rank: int) -> Marks | None:
    """The marks of the outputs, by those of an input; None if positions do not go along."""
    after = [""] * rank
    for axis, mark in zip(reversed((*[None] * len(marks), *axes)), reversed(marks), strict=False):
        if mark and axis is None:
            return None
        if mark and axis is not None:
            after[axis] = mark
    return tuple(after)
