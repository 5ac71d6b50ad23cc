"""Gemm with a bias between two Reshapes, as a MatMul and a sum.

On a GPU, Gemm first writes its bias to every row and then reads it back. A sum goes into the next operator: the attention, an
activation, or the next normalization.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import only_use
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, constant_tensor, is_standard

_PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}


@enabling("Gemm split into MatMul and Add, so that the bias can be fused", "Gemm", "split-gemm")
def as_product(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`reshape(gemm(reshape(x), w, b))` with all axes but the last as they were, as `x @ w + b`."""
    facts = builder.facts
    if len(node.inputs) < 3 or any(attribute(node, name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    flat, weight, bias = node.inputs[:3]
    before = None if flat is None else flat.producer()
    after = only_use(node.outputs[0], "Reshape")
    if after is None or not is_standard(before, "Reshape") or weight is None or bias is None:
        return None
    x, result = before.inputs[0], after.outputs[0]
    old, new = None if x is None else facts.dims(x), facts.dims(result)
    width = facts.dims(bias)
    if x is None or old is None or new is None or width is None or len(width) != 1 or constant_tensor(weight) is None:
        return None
    if len(old) < 3 or old[:-1] != new[:-1] or new[-1:] != width or flat is None or (facts.dims(flat) or ())[-1:] != old[-1:]:
        return None
    builder.at(after)
    product = builder.node("MatMul", [x, weight], hint=f"{node.name}/MatMul")
    total = builder.node("Add", [product, bias], hint=f"{node.name}/bias")
    return EnablingChange(((result, total),), (x,))
