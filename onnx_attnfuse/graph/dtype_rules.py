"""Element types of results, for exports that do not annotate them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_tensor

if TYPE_CHECKING:
    from onnx_attnfuse.graph.facts import Facts

_BOOLEAN = frozenset("Equal Less LessOrEqual Greater GreaterOrEqual And Or Xor Not IsNaN IsInf".split())
_INDEX = frozenset("Shape Size ArgMax ArgMin NonZero".split())
_SECOND = frozenset(["Where", "CastLike"])


def infer_dtype(node: ir.Node, index: int, facts: Facts) -> ir.DataType | None:
    """The element type of output `index`, or None."""
    op = node.op_type
    if op in _BOOLEAN:
        return ir.DataType.BOOL
    if op in _INDEX or (op == "TopK" and index == 1):
        return ir.DataType.INT64
    if op == "Cast":
        target = attribute(node, "to")
        return None if target is None else ir.DataType(target)
    if op == "Constant":
        tensor = constant_tensor(node.outputs[0])
        return None if tensor is None else tensor.dtype
    if op in {"ConstantOfShape", "EyeLike"}:
        fill = attribute(node, "value")
        return ir.DataType.FLOAT if fill is None else fill.dtype
    if op == "Dropout" and index == 1:
        return ir.DataType.BOOL
    source = 1 if op in _SECOND else 0
    value = node.inputs[source] if source < len(node.inputs) else None
    return None if value is None else facts.dtype(value)
