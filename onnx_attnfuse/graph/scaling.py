"""A tensor multiplied or divided by one number, as a Mul or a Div computes it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A product or quotient of a tensor and a number other than 0."""

    tensor: ir.Value
    """The scaled value, of the rank of the result."""
    operand: ir.Value
    """The other operand, whose elements are all the number."""
    number: float
    is_quotient: bool

    def of(self, factor: float) -> float:
        """A factor multiplied, or divided, by the number."""
        return factor / self.number if self.is_quotient else factor * self.number


def read_scaling(node: ir.Node | None, facts: Facts) -> Scaling | None:
    """The scaling that a node is; None where it is none, or not known to be."""
    if not is_standard(node, "Mul", "Div"):
        return None
    for place in (0, 1) if node.op_type == "Mul" else (1,):
        operand, tensor = node.inputs[place], node.inputs[1 - place]
        number = facts.number(operand)
        if operand is not None and tensor is not None and number and facts.rank(tensor) == facts.rank(node.outputs[0]):
            return Scaling(tensor, operand, number, node.op_type == "Div")
    return None
