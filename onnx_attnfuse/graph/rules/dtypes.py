"""Element types of results, for exports that do not annotate them.

The standard says of each output which input it has its type from, or that it is fixed; types that depend on an attribute are
written down here.
"""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_tensor, given, subgraphs
from onnx_attnfuse.graph.facts_view import Known
from onnx_attnfuse.graph.ops import plain_domain

_STATED = {
    "Bernoulli": "dtype",
    "Cast": "to",
    "DequantizeLinear": "output_dtype",
    "EyeLike": "dtype",
    "QuantizeLinear": "output_dtype",
    "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype",
}
"""Operators that state the type in an attribute, some of them only if it is not that of their input."""
_ROUNDING = frozenset(["DequantizeLinear", "QuantizeLinear"])
"""Operators whose type is that of their scale, or of their zero point, unless they state another."""
_TYPED_BY = {
    "GatherBlockQuantized": (2,),
    "MatMulIntegerToFloat": (2,),
    "QAttention": (3,),
    "QGemm": (8, 1),
    "QLinearConcat": (1,),
    "QLinearWhere": (1,),
}
"""Operators of com.microsoft whose type is that of another input than the first: the first of these that there is."""
_OWN_OF_RUNTIME = {"SimplifiedLayerNormalization": (1,)}
"""Operators that ONNX Runtime has put into the standard's domain: the inputs that the first output has its type from."""

_INT32 = frozenset(["MatMulInteger16", "MulInteger", "ReduceSumInteger"])
"""Operators of com.microsoft that sum up whole numbers."""


def infer_dtype(node: ir.Node, index: int, facts: Known) -> ir.DataType | None:
    """The element type of output `index`, or None."""
    op = node.op_type
    if op in _STATED and attribute(node, _STATED[op]):
        return ir.DataType(attribute(node, _STATED[op]))
    if op == "Constant":
        tensor = constant_tensor(node.outputs[0])
        return None if tensor is None else tensor.dtype
    if op == "ConstantOfShape":
        fill = attribute(node, "value")
        return ir.DataType.FLOAT if fill is None else fill.dtype
    if op == "If":
        given_by = {facts.dtype(branch.outputs[index]) for branch in subgraphs(node)}
        return given_by.pop() if len(given_by) == 1 else None
    fixed, inputs = _typing(plain_domain(node.domain), op, index)
    if fixed is not None:
        return fixed
    known = (facts.dtype(value) for value in (given(node, place) for place in inputs) if value is not None)
    return next(known, ir.DataType.UINT8 if op == "QuantizeLinear" else None)


@functools.cache
def _typing(domain: str, op: str, index: int) -> tuple[ir.DataType | None, tuple[int, ...]]:
    """The type that an output always has, if it has one, and the inputs that have the same type as it."""
    if op == "EmbedLayerNormalization":
        return (ir.DataType.INT32 if index == 1 else None), (2,)
    if op in _ROUNDING:
        return (None, (1,)) if op == "DequantizeLinear" else (None, (2,))
    if not domain and op in _OWN_OF_RUNTIME:
        return None, () if index else _OWN_OF_RUNTIME[op]
    if domain:
        return (ir.DataType.INT32, ()) if op in _INT32 else (None, _TYPED_BY.get(op, (0,)))
    if not onnx.defs.has(op):
        return None, ()
    schema = onnx.defs.get_schema(op)
    output = schema.outputs[min(index, len(schema.outputs) - 1)]
    if not output.is_homogeneous:
        return None, ()
    allowed = next((item.allowed_type_strs for item in schema.type_constraints if item.type_param_str == output.type_str), None)
    types = [output.type_str] if allowed is None else allowed
    fixed = types[0].removeprefix("tensor(").removesuffix(")").upper() if len(types) == 1 else ""
    inputs = tuple(place for place, item in enumerate(schema.inputs) if item.type_str == output.type_str)
    return ir.DataType.__members__.get(fixed), inputs
