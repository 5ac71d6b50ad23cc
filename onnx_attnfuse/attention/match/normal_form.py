"""Values in normal form: the graph executed by certificates' meanings, from values of which nothing more is asked."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.contraction import read_contraction
from onnx_attnfuse.certify.execution import Execution
from onnx_attnfuse.certify.terms import size
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE

MOST_NODES = 256
"""Nodes above or below a value beyond which it is left as it is."""


class Reading(Execution):
    """The graph, executed from values whose elements are ordinary numbers; all others may hold numbers that mask."""

    def __init__(self, facts: Facts, ends: Sequence[ir.Value]) -> None:
        self.names: dict[ir.Value, str] = {}
        super().__init__(facts, self._name, {}, lambda value: value in ends or is_product(value, facts), facts.opset, size)
        self._ordinary = ends

    def _name(self, value: ir.Value) -> str:
        return self.names.setdefault(value, f"{'v' if value in self._ordinary else 'm'}{len(self.names)}")


def is_product(value: ir.Value, facts: Facts) -> bool:
    """Whether a value is a product of two computed ones."""
    node = value.producer()
    product = None if node is None else read_contraction(node, facts)
    return product is not None and not any(map(is_constant, product.operands))


def nodes_between(first: ir.Value, last: ir.Value) -> list[ir.Node] | None:
    """The nodes on the ways from one value to another, in order; None if something else looks into them."""
    below, moved = set[ir.Node](), [first]
    for value in moved:
        for node, _ in () if value is last else value.uses():
            if node.op_type in ASKS_SHAPE or node in below:
                continue
            if (node.graph is not first.graph and node.graph is not last.graph) or len(below) == MOST_NODES:
                return None
            below.add(node)
            moved += node.outputs
    ordered = dict[ir.Node, None]()

    def place(node: ir.Node | None) -> None:
        if node in below and node not in ordered:
            for item in node.inputs:
                place(None if item is None else item.producer())
            ordered[node] = None

    place(last.producer())
    return list(ordered)
