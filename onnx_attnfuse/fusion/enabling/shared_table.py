"""The last product of a model with a tied embedding, which reads the table of tokens as it lies.

Exporters write `x @ Transpose(table)` with the table that tokens are looked up in. When a session starts ONNX Runtime computes
the Transpose and keeps both: 272 MB a second time for Qwen2 of 0.5 B (benchmarks/results/whole_models_h200.md). FusedMatMul reads
the table itself. Where nothing else reads it, there is one copy either way.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, constant_tensor, is_standard
from onnx_attnfuse.graph.ops import CONTRIB

_FEWEST_ELEMENTS = 1 << 20
"""Smaller tables are not worth another operator."""


@enabling("products that read the token embedding in place, without a transposed copy", "MatMul", "shared-table")
def with_one_table(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`x @ Transpose(table)` as FusedMatMul, where others read the table too."""
    x, turned = node.inputs
    turning = None if turned is None else turned.producer()
    if x is None or turned is None or not is_standard(turning, "Transpose") or attribute(turning, "perm", [1, 0]) != [1, 0]:
        return None
    table = turning.inputs[0]
    tensor = constant_tensor(table)
    if table is None or tensor is None or tensor.size < _FEWEST_ELEMENTS or len(tensor.shape) != 2:
        return None
    if len(table.uses()) < 2 or len(turned.uses()) > 1 or turned.is_graph_output():
        return None
    result = node.outputs[0]
    product = builder.node("FusedMatMul", [x, table], {"transB": 1}, domain=CONTRIB, hint=f"{node.name}/FusedMatMul")
    return EnablingChange(((result, product),), (x,))
