"""Rules of operators on shapes, contents and element types: one table per kind, one rule per kind of operator.

A shape rule gets a node and the facts about its inputs, and returns a shape per output, None where unknown. Where
the standard's operators have no rule here, ONNX's own inference is asked. Axis lengths that a rule does not know are fresh
symbols, so that at least the rank is known.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.ops import is_attention, plain_domain
from onnx_attnfuse.graph.rules.contents import CONTENTS
from onnx_attnfuse.graph.rules.products import PRODUCTS, contrib_attention
from onnx_attnfuse.graph.rules.reading import ShapeRule
from onnx_attnfuse.graph.rules.selections import SELECTIONS
from onnx_attnfuse.graph.rules.shapes import ELEMENTWISE, MAKERS, VIEWS
from onnx_attnfuse.graph.rules.tables import contrib_rule, infer_dtype, inferred

__all__ = ["CONTENTS", "infer_dtype", "shape_rule"]

_SHAPES: dict[str, ShapeRule] = ELEMENTWISE | MAKERS | PRODUCTS | SELECTIONS | VIEWS
"""The rule of each operator whose result has a shape that can be known."""


def shape_rule(node: ir.Node) -> ShapeRule | None:
    """The rule for the shapes that a node gives, or None if there is none."""
    ruled = _SHAPES.get(node.op_type)
    if ruled is not None or plain_domain(node.domain) == "":
        return ruled or inferred
    return contrib_rule(node.op_type) or (contrib_attention if is_attention(node) else None)
