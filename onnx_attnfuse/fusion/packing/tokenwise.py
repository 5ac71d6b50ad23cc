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
    changed: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """The attributes that count axes, and so differ on packed tokens; None for one that is left out."""
    build: Build | None = None
    """Builds the outputs where that is no copy of the node."""

    def inputs(self) -> list[tuple[ir.Value, Marks]]:
        """The inputs that consist of tokens."""
        found = [(self.node.inputs[place], marks) for place, marks in self.marks.items()]
        return [(value, marks) for value, marks in found if value is not None]

    def free(self) -> list[ir.Value]:
        """The inputs that are the same for all tokens."""
        return [value for place, value in enumerate(self.node.inputs) if value is not None and place not in self.marks]

    def on_packed(self, builder: Builder, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """The outputs for packed tokens, which take the place of `inputs`."""
        packed = dict(zip(self.marks, operands, strict=True))
        if self.build is not None:
            return self.build(builder, packed)
        return self.copied(builder, [packed.get(place, value) for place, value in enumerate(self.node.inputs)])

    def copied(self, builder: Builder, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        """The outputs of the operator on other inputs."""
        node, facts = self.node, builder.facts
        count = count_of(next(value for place, value in enumerate(inputs) if value is not None and place in self.marks), facts)
        attributes = {name: item.value for name, item in node.attributes.items()} | dict(self.changed)
        attributes = {name: item for name, item in attributes.items() if item is not None}
        hint = f"{node.name or node.op_type}/packed"
        first = builder.node(node.op_type, inputs, attributes, domain=node.domain, hint=hint, outputs=len(self.outputs))
        made = producer_of(first)
        made.metadata_props.update(node.metadata_props)
        for old, new, marks in zip(node.outputs, made.outputs, self.outputs, strict=False):
            dtype = facts.dtype(old)
            facts.record(new, (count, *others(marks, facts.dims(old) or ())), dtype)
            if dtype is not None:
                new.dtype = dtype
        return made.outputs


Rule = Callable[[ir.Node, ir.Value, Marks, Tokens], "Step | Reason"]


def refusal(node: ir.Node, why: str) -> Reason:
    """Why a node stays as it is."""
    return Reason("not-position-wise", f"{node.op_type} {why}", node.name)


def packed_axis(marks: Marks, axis: int) -> int | None:
    """Where an axis of channels lies in packed form; None for one of tokens."""
    axis %= len(marks)
    return None if marks[axis] else 1 + sum(not mark for mark in marks[:axis])


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An attribute that is a number."""
    found: int = attribute(node, name, default)
    return found
