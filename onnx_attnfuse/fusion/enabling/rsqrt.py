"""`x · (1 / sqrt(v))` as `x / sqrt(v)`.

Torch's `rsqrt` is exported as Sqrt and Reciprocal. ONNX Runtime finds RMS normalization by its division, and a decomposed one
costs six passes over the activations instead of one.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder


@enabling("x * (1 / r) rewritten as x / r, so that ONNX Runtime fuses RMSNorm", "Mul", "quotients")
def as_quotient(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A Mul by a Reciprocal that nothing else looks at, of a square root, as a Div."""
    for one, other in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        inverse = None if one is None else one.producer()
        if one is None or other is None or inverse is None or inverse.op_type != "Reciprocal" or len(one.uses()) != 1:
            continue
        root = inverse.inputs[0]
        if one.is_graph_output() or root is None or root.is_graph_output() or len(root.uses()) != 1:
            continue
        origin = root.producer()
        if origin is None or origin.op_type != "Sqrt":
            continue
        result = node.outputs[0]
        quotient = builder.node("Div", [other, root], hint=f"{node.name}/quotient")
        return EnablingChange(((result, quotient),), (other, *(value for value in origin.inputs if value is not None)))
    return None
