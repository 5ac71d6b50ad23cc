"""Token-wise operators, which compute every token by itself, and how each runs on packed tokens.

A rule is one function that gives a `Step` for a node or says why not; `tokenwise_ops.read_step` asks the rule of an operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.packing.token_axes import Marks, Tokens, count_of, others
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Reason

Build = Callable[[Builder, Mapping[int, ir.Value]], Sequence[ir.Value]]
"""Given the replacement of each input that consists of tokens, the node's outputs for these."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A node that computes every token by itself."""

    node: ir.Node
    marks: Mapping[int, Marks]
    """The inputs of the node that consist of tokens, by place, and their marks."""
    outputs: tuple[Marks, ...]
    """The marks of its outputs."""
    build: Build

    def inputs(self) -> list[tuple[ir.Value, Marks]]:
        """The inputs that consist of tokens."""
        found = [(self.node.inputs[place], marks) for place, marks in self.marks.items()]
        return [(value, marks) for value, marks in found if value is not None]

    def free(self) -> list[ir.Value]:
        """The inputs that are the same for all tokens."""
        return [value for place, value in enumerate(self.node.inputs) if value is not None and place not in self.marks]


Rule = Callable[[ir.Node, ir.Value, Marks, Tokens], "Step | Reason"]


def refusal(node: ir.Node, why: str) -> Reason:
    """Why a node stays as it is."""
    return Reason("not-position-wise", f"{node.op_type} {why}", node.name)


def clone_on_packed(
    step_node: ir.Node,
    builder: Builder,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[Marks],
    count: ir.Value,
    **changed: object,
) -> Sequence[ir.Value]:
    """Clones an operator onto packed tokens, with other inputs and, where they count axes, other attributes.

    Args:
        step_node: The operator.
        builder: Builds the clone.
        inputs: Inputs of the clone.
        outputs: Marks of its outputs.
        count: A packed value, whose first axis is as long as that of the outputs.
        **changed: Attributes that differ from the operator's; None leaves one out.
    """
    facts = builder.facts
    attributes = {name: item.value for name, item in step_node.attributes.items() if name not in changed}
    shapes = [
        (count_of(count, facts), *others(marks, facts.dims(item) or ()))
        for item, marks in zip(step_node.outputs, outputs, strict=False)
    ]
    first = builder.node(
        step_node.op_type,
        inputs,
        {**attributes, **{name: item for name, item in changed.items() if item is not None}},
        domain=step_node.domain,
        hint=f"{step_node.name or step_node.op_type}/packed",
        outputs=len(outputs),
    )
    node = producer_of(first)
    node.metadata_props.update(step_node.metadata_props)
    for old, new, dims in zip(step_node.outputs, node.outputs, shapes, strict=False):
        dtype = facts.dtype(old)
        facts.record(new, dims, dtype)
        if dtype is not None:
            new.dtype = dtype
    return node.outputs


def packed_axis(marks: Marks, axis: int) -> int | None:
    """Where an axis of channels lies in packed form; None for one of tokens."""
    axis %= len(marks)
    return None if marks[axis] else 1 + sum(not mark for mark in marks[:axis])


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An attribute that is a number."""
    found: int = attribute(node, name, default)
    return found
