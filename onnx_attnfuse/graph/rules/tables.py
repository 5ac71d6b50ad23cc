"""Shapes from tables: those that ONNX's own inference gives, and operators of ONNX Runtime as lines of data.

A line has the shape of each output, apart by commas, made of words apart by blanks: `0` is all axes of input 0, `0[:-1]` those
before the last, `1[0]` a single one, a name the attribute of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_tensor, read_tensor, subgraphs
from onnx_attnfuse.graph.facts_view import Dims, Known
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
        dtype = None if value is None else facts.dtype(value)
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
    proto.attribute.extend(ir.to_proto(item) for item in node.attributes.values())
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
