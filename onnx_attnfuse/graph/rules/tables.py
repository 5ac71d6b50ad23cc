"""Shapes and element types from tables: those that ONNX's own inference gives, and operators of ONNX Runtime as lines of data.

A line has the shape of each output, apart by commas, made of words apart by blanks: `0` is all axes of input 0, `0[:-1]` those
before the last, `1[0]` a single one, a name the attribute of that name.

Element types are for exports that do not annotate them. The standard says of each output which input it has its type from, or
that it is fixed; types that depend on an attribute are written down here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_tensor, given, read_tensor, subgraphs
from onnx_attnfuse.graph.facts_view import Dims, Known
from onnx_attnfuse.graph.ops import plain_domain
from onnx_attnfuse.graph.rules.reading import ShapeRule, input_dims
from onnx_attnfuse.graph.sizes import Dim

_LINES = """
BiasAdd                  0
CDist                    0[0] 1[0]
ComplexMul               0
ComplexMulConj           0
DynamicQuantizeLSTM      0[0] 1[0] 0[1] hidden_size, 1[0] 0[1] hidden_size, 1[0] 0[1] hidden_size
GatedAdd                 0
GatedRMSNorm             0
Gelu                     0
GroupNorm                0
Inverse                  0
LongformerAttention      0
MatMulBnb4               0[:-1] N
MatMulNBits              0[:-1] N
MatMulNBitsMlp           0[:-1] N, 0
MatMulNBitsQkv           0[:-1] Nq, 0[:-1] Nkv, 0[:-1] Nkv, 0
MoE                      0
MulInteger               0
QMoE                     0
QuantizeWithOrder        0
RotaryEmbedding          0
SkipGroupNorm            0, 0
"""
_SMALL = 1 << 10
"""Elements of a constant that inference is given the content of."""
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


def _line(text: str) -> ShapeRule:
    outputs = [output.split() for output in text.split(",")]

    def rule(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
        return [_shape(words, node, facts) for words in outputs]

    return rule


def _shape(words: Sequence[str], node: ir.Node, facts: Known) -> Dims | None:
    found: list[Dim] = []
    for word in words:
        place, _, part = word.rstrip("]").partition("[")
        if not place.isdigit():
            found.append(int(attribute(node, place)))
            continue
        dims = input_dims(node, int(place), facts)
        if dims is None:
            return None
        found += dims if not part else dims[:-1] if part == ":-1" else [dims[int(part)]]
    return tuple(found)


_TABLE: Mapping[str, ShapeRule] = {
    op: _line(text) for op, text in (line.split(maxsplit=1) for line in _LINES.split("\n") if line)
}


def contrib_rule(op: str) -> ShapeRule | None:
    """The rule of an operator of com.microsoft that is a line, or None."""
    return _TABLE.get(op)


def inferred(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """The shapes that ONNX's inference gives for one operator of the standard, symbols kept."""
    schema = onnx.defs.get_schema(node.op_type) if onnx.defs.has(node.op_type) else None
    if schema is None or schema.deprecated or list(subgraphs(node)) or not set(node.attributes) <= set(schema.attributes):
        return []
    names: dict[str, Dim] = {}
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for place, value in enumerate(node.inputs):
        dtype = facts.dtype(value)
        if value is None or dtype is None:
            continue
        dims, tensor = facts.dims(value), constant_tensor(value)
        shape = None if dims is None else [_size(dim, names) for dim in dims]
        types[f"i{place}"] = onnx.helper.make_tensor_type_proto(dtype.value, shape)
        array = None if tensor is None or tensor.size > _SMALL else read_tensor(tensor)
        if array is not None:
            data[f"i{place}"] = onnx.numpy_helper.from_array(array)
    inputs = ["" if value is None else f"i{place}" for place, value in enumerate(node.inputs)]
    outputs = [f"o{place}" if value.name else "" for place, value in enumerate(node.outputs)]
    proto = onnx.helper.make_node(node.op_type, inputs, outputs)
    proto.attribute.extend(map(ir.serde.serialize_attribute, node.attributes.values()))
    try:
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return []
    return [_dims(value, found.get(name), names, facts) for value, name in zip(node.outputs, outputs, strict=True)]


def _size(dim: Dim, names: dict[str, Dim]) -> int | str:
    if isinstance(dim, int):
        return dim
    names[str(dim)] = dim
    return str(dim)


def _dims(value: ir.Value, found: onnx.TypeProto | None, names: Mapping[str, Dim], facts: Known) -> Dims | None:
    if found is None or not found.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else names.get(dim.dim_param, facts.fresh(value, axis))
        for axis, dim in enumerate(found.tensor_type.shape.dim)
    )


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
