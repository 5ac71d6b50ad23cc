"""A residual sum that is only normalized, written such that ONNX Runtime leaves both apart.

ONNX Runtime makes one SkipLayerNormalization of Add and LayerNormalization wherever it can tell that both summands have one
shape, which after a fused attention it can more often than before. Its kernel for the CPU computes a row number by number and
takes four to seven times as long as the two (docs/decisions/0026). It does not look at Sum, which gives the same.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard

_RANK = 3


@enabling(
    "residual Adds kept apart from LayerNormalization (SkipLayerNormalization is slower on CPU)",
    "LayerNormalization",
    "separate-norm",
)
def as_separate_sum(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """An Add of float32 tensors of one shape that only a LayerNormalization looks at, as a Sum."""
    if node.inputs[0] is None:
        return None
    total, facts = node.inputs[0], builder.facts
    added = total.producer()
    if not is_standard(added, "Add") or len(total.uses()) != 1 or total.is_graph_output():
        return None
    left, right = added.inputs
    dims = facts.dims(total)
    if left is None or right is None or dims is None or len(dims) != _RANK or facts.dtype(total) != ir.DataType.FLOAT:
        return None
    if facts.dims(left) != dims or facts.dims(right) != dims:
        return None
    builder.at(added)
    made = builder.node("Sum", [left, right], hint=f"{added.name}/sum")
    return EnablingChange(((total, made),), (left, right))
