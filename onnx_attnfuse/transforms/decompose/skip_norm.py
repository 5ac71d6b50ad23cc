"""SkipLayerNormalization and SkipSimplifiedLayerNormalization of com.microsoft, spelled out: a sum, then its norm."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewriting import GraphContext

_PLAIN, _SIMPLIFIED = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
_SPELLING = Subject("spelling out a normalization")
_SINCE, _EPSILON, _SUM = 17, 1e-12, 3
"""The opset that LayerNormalization is there from, the default of both operators, and the place of the sum among the results."""


def is_skip_norm(node: ir.Node) -> bool:
    """Whether the node is one of the two operators."""
    return node.domain == CONTRIB and node.op_type in {_PLAIN, _SIMPLIFIED}


def gives_sum(node: ir.Node) -> bool:
    """Whether the sum of such a node is used too."""
    return len(node.outputs) > _SUM and bool(node.outputs[_SUM].uses() or node.outputs[_SUM].is_graph_output())


def spell_out_norm(graph: GraphContext, node: ir.Node) -> bool:
    """Spells one out, verified; whether that could be done."""
    with graph.rewrite(node, _SPELLING) as edit:
        total, result = _spelled(graph.builder, node)
        pairs = [(node.outputs[0], result)]
        if gives_sum(node):
            pairs.append((node.outputs[_SUM], total))
        edit.replace(pairs, [value for value in node.inputs[:2] if value is not None])
    return edit.reason is None


def _spelled(build: Builder, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The sum, and what is normalized.

    Raises:
        Refused: An operand or a size is not known, or statistics are used.
    """
    plain = node.op_type == _PLAIN
    operand, skip, weight, *others = [*node.inputs, None, None, None][:5]
    shift, bias = (others[0], others[1]) if plain else (None, others[0])
    dtype = None if operand is None else build.facts.dtype(operand)
    dims = None if operand is None else build.facts.dims(operand)
    if operand is None or skip is None or weight is None or dtype is None or dims is None:
        raise Refused("malformed", "an operand is missing, or its shape is not known", node.name)
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:_SUM]):
        raise Refused("not-spelled", f"the statistics of {node.op_type} are not spelled out", node.name)
    total = build.elementwise("Add", [operand, skip], dtype)
    total = total if bias is None else build.elementwise("Add", [total, bias], dtype)
    epsilon = attribute(node, "epsilon", _EPSILON)
    if plain:
        if build.opset < _SINCE:
            raise Refused("old-opset", f"opset {build.opset} lacks LayerNormalization; raise it to {_SINCE}", node.name)
        inputs = [total, weight, *([] if shift is None else [shift])]
        return total, build.node("LayerNormalization", inputs, {"axis": -1, "epsilon": epsilon}, dims=dims, dtype=dtype)
    wide = build.cast(total, ir.DataType.FLOAT)
    squares = build.elementwise("Mul", [wide, wide], ir.DataType.FLOAT)
    mean = build.reduce("ReduceMean", squares, [len(dims) - 1])
    shifted = build.elementwise("Add", [mean, build.scalar(epsilon, ir.DataType.FLOAT)], ir.DataType.FLOAT)
    root = build.node("Sqrt", [shifted], dims=build.facts.dims(shifted), dtype=ir.DataType.FLOAT)
    scaled = build.cast(build.elementwise("Div", [wide, root], ir.DataType.FLOAT), dtype)
    return total, build.elementwise("Mul", [scaled, weight], dtype)
