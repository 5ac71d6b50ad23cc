"""Normalizations spelled out: SkipLayerNormalization, SkipSimplifiedLayerNormalization, and RMSNormalization of ai.onnx."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewriting import GraphContext

_PLAIN, _SIMPLIFIED = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
_RMS, _RMS_EPSILON = "RMSNormalization", 1e-5
_SPELLING = Subject("spelling out a normalization")
_SINCE, _EPSILON, _SUM = 17, 1e-12, 3
"""The opset that LayerNormalization is there from, the default of both operators of sums, and the place of the sum among the
results."""


def is_skip_norm(node: ir.Node) -> bool:
    """Whether the node is one of the two operators of com.microsoft."""
    return node.domain == CONTRIB and node.op_type in {_PLAIN, _SIMPLIFIED}


def is_rms_norm(node: ir.Node) -> bool:
    """Whether the node is an RMSNormalization of ai.onnx."""
    return node.domain == "" and node.op_type == _RMS


def gives_sum(node: ir.Node) -> bool:
    """Whether the sum of such a node is used too."""
    return len(node.outputs) > _SUM and bool(node.outputs[_SUM].uses() or node.outputs[_SUM].is_graph_output())


def spell_out_norm(graph: GraphContext, node: ir.Node) -> bool:
    """Spells one out, verified; whether that could be done."""
    with graph.rewrite(node, _SPELLING) as edit:
        if is_rms_norm(node):
            edit.replace(
                [(node.outputs[0], _rms_spelled(graph.builder, node))], [value for value in node.inputs[:1] if value is not None]
            )
            return True
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
    return total, build.elementwise("Mul", [_over_root(build, total, dtype, [len(dims) - 1], epsilon), weight], dtype)


def _rms_spelled(build: Builder, node: ir.Node) -> ir.Value:
    """What an RMSNormalization gives.

    Raises:
        Refused: Its shape or type is not known, or it is not computed in float32.
    """
    operand, weight = node.inputs[:2]
    dims = None if operand is None else build.facts.dims(operand)
    dtype = None if operand is None else build.facts.dtype(operand)
    if operand is None or weight is None or dims is None or dtype is None or build.facts.dtype(weight) != dtype:
        raise Refused("malformed", "the shape or the types of what is normalized are not known, or differ", node.name)
    if attribute(node, "stash_type", int(ir.DataType.FLOAT)) != ir.DataType.FLOAT:
        raise Refused("not-spelled", f"{_RMS} that is not computed in float32 is not spelled out", node.name)
    first = attribute(node, "axis", -1) % len(dims)
    epsilon = attribute(node, "epsilon", _RMS_EPSILON)
    return build.elementwise("Mul", [_over_root(build, operand, dtype, range(first, len(dims)), epsilon), weight], dtype)


def _over_root(build: Builder, value: ir.Value, dtype: ir.DataType, axes: Sequence[int], epsilon: float) -> ir.Value:
    """A value divided by the root of the mean of its squares, computed in float32."""
    wide = build.cast(value, ir.DataType.FLOAT)
    squares = build.elementwise("Mul", [wide, wide], ir.DataType.FLOAT)
    mean = build.reduce("ReduceMean", squares, list(axes))
    shifted = build.elementwise("Add", [mean, build.scalar(epsilon, ir.DataType.FLOAT)], ir.DataType.FLOAT)
    root = build.node("Sqrt", [shifted], dims=build.facts.dims(shifted), dtype=ir.DataType.FLOAT)
    return build.cast(build.elementwise("Div", [wide, root], ir.DataType.FLOAT), dtype)
