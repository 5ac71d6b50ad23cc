"""Nodes of the standard that an execution provider computes wrong, written so that it is right; their records say which."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CASTS, REARRANGES
from onnx_attnfuse.graph.uses import reached

_NORMS = frozenset(["LayerNormalization", "RMSNormalization"])
_REACHES = REARRANGES | CASTS | {"Add", "Sub", "Mul", "MatMul", "Gemm"}
"""Operators through which a normalization was seen to take a sum or product in; after others it is right."""
_TABLE_AXES = _MOST_INDEX_AXES = 2


@enabling("indices laid flat", "Gather", None)
def with_flat_indices(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """Gather of rows with its indices laid flat, where these have many axes.

    Gather(data, indices)                                            (b, 1, 1, s) of (n, 1), as padding is looked up
    Reshape(Gather(data, Reshape(indices)))                          the same elements
    """
    data, indices = node.inputs
    dims, lengths = (builder.facts.dims(value) for value in (data, indices))
    if data is None or indices is None or dims is None or lengths is None or len(lengths) <= _MOST_INDEX_AXES:
        return None
    if attribute(node, "axis", 0) not in {0, -len(dims)}:
        return None
    rows = builder.node("Gather", [data, builder.reshape(indices, (math.prod(lengths),))], {"axis": 0})
    return EnablingChange(((node.outputs[0], builder.reshape(rows, (*lengths, *dims[1:]))),), (data, indices))


@enabling("operands of normalizations kept apart", "Reciprocal Add Mul", None)
def apart_from_norms(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """An operand of a normalization, for a provider that merges it in and is wrong then.

    Reciprocal(Sqrt(x))                                              Div(1, Sqrt(x))            a root mean square
    Add(x, table)                          (b, s, c) and (1, s, c)   Add(x, Expand(table))      positions that all entries share
    """
    facts, result = builder.facts, node.outputs[0]
    operands, dtype, dims = [value for value in node.inputs if value is not None], facts.dtype(result), facts.dims(result)
    if dtype is None or not dtype.is_floating_point():
        return None
    if is_standard(node, "Reciprocal"):
        quotient = [builder.scalar(1.0, dtype), *operands]
        is_of_root = is_standard(operands[0].producer(), "Sqrt")
        return EnablingChange(((result, builder.elementwise("Div", quotient)),), tuple(operands)) if is_of_root else None
    shared = _shared(node, facts)
    if not shared or dims is None or not _reaches_norm(node):
        return None
    whole = [builder.expand(value, dims) if value in shared else value for value in operands]
    return EnablingChange(((result, builder.elementwise(node.op_type, whole)),), tuple(operands))


def _shared(node: ir.Node, facts: Facts) -> list[ir.Value]:
    """The operands of a sum or product that are the same for all entries, and have all the other axes."""
    dims = facts.dims(node.outputs[0])
    if dims is None or any(not isinstance(dim, int) for dim in dims):
        return []
    return [value for value in node.inputs if value is not None and _is_table(facts.dims(value), dims)]


def _is_table(dims: Dims | None, whole: Dims) -> bool:
    if dims is None or len(dims) > len(whole):
        return False
    laid = (*(1,) * (len(whole) - len(dims)), *dims)
    own = next((axis for axis, dim in enumerate(laid) if dim != 1), len(laid))
    return laid[own:] == whole[own:] and len(whole) - own >= _TABLE_AXES and any(dim != 1 for dim in whole[:own])


def _reaches_norm(node: ir.Node) -> bool:
    """Whether a normalization reads a node's result, by way of sums, products and views only."""

    def after(value: ir.Value) -> Iterator[ir.Value]:
        return (output for reader, _ in value.uses() if is_standard(reader, *_REACHES) for output in reader.outputs)

    return any(is_standard(reader, *_NORMS) for value in reached(node.outputs, after) for reader, _ in value.uses())
