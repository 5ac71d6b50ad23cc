"""One node of a fused operator as its record reads it: inputs by name, shapes and attributes, or why they are not known."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.schemas import why_unknown
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.conditions import AttentionParams, MaskForm
from onnx_attnfuse.kernels.operators import info_of
from onnx_attnfuse.reasons import Reason, Refused


@dataclasses.dataclass(frozen=True)
class OpNode:
    """A node of a fused operator, and the facts about its inputs, by their names."""

    op: str
    """The operator's name among fused operators."""
    names: tuple[str, ...]
    """The names of all its inputs, in order."""
    node: ir.Node
    facts: Facts
    params: ClassVar[type[AttentionParams]] = AttentionParams
    """The description of a node; records take it from here, as its module imports onnx-ir."""

    def has(self, name: str) -> bool:
        """Whether an input is given."""
        return self._input(name) is not None

    def dims(self, name: str) -> Dims:
        """The shape of an input.

        Raises:
            Refused: It is not known.
        """
        value = self._input(name)
        dims = self.facts.dims(value)
        if dims is None:
            place = self.names.index(name)
            raise Refused("unknown-rank", f"the shape of input {place} of {self.node.op_type} is not known", self.node.name)
        return dims

    def dtype(self) -> ir.DataType:
        """The element type of the first input.

        Raises:
            Refused: It is not known.
        """
        value = self.node.inputs[0]
        dtype = self.facts.dtype(value)
        if dtype is None:
            raise Refused("unknown-type", f"the element type of {self.node.op_type} is not known", self.node.name)
        return dtype

    def part(self, dim: Dim, count: int) -> Dim:
        """A length divided into so many parts.

        Raises:
            Refused: It does not come out even.
        """
        found = sizes.exact_quotient(dim, count) if count else None
        if found is None:
            raise Refused("unknown-head-size", f"{dim} channels are not {count} heads", self.node.name)
        return found

    def number(self, name: str, default: int = 0) -> int:
        """An attribute that is an integer."""
        return int(attribute(self.node, name, default))

    def numbers(self, name: str) -> list[int]:
        """An attribute that is a list of integers, empty if it is not given."""
        return list(attribute(self.node, name, ()))

    @property
    def is_capped(self) -> bool:
        """Whether scores are capped by tanh."""
        return bool(attribute(self.node, "softcap", 0.0))

    def mask(self, name: str, bias: str, batch: Dim) -> MaskForm:
        """The form of a mask of com.microsoft, and of the additive bias."""
        if not self.has(name):
            return "bias" if self.has(bias) else "none"
        dims = self.dims(name)
        if len(dims) != 1:
            return "raw"
        if self.has(bias):
            raise Refused("unknown-form", "lengths and a bias together", self.node.name)
        if dims[0] == batch:
            return "lengths"
        if dims[0] != batch * 3 + 2:
            raise Refused("unknown-form", f"a mask of {dims[0]} numbers for {batch} entries", self.node.name)
        return "ranges"

    def _input(self, name: str) -> ir.Value | None:
        place = self.names.index(name)
        return self.node.inputs[place] if place < len(self.node.inputs) else None


def params_of_node(node: ir.Node, facts: Facts) -> AttentionParams | Reason:
    """The parameters of the attention that a fused operator computes, or which of them is not known."""
    info = info_of(node)
    if info is None or info.describe is None:
        return Reason("unknown-operator", f"the kernels of {node.op_type} are not known", node.name)
    unknown = why_unknown(node)
    if unknown is not None:
        return Reason("unread-part", unknown, node.name)
    try:
        return info.describe(OpNode(info.key, tuple(info.inputs), node, facts))
    except Refused as refused:
        return refused.reason
