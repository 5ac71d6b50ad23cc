"""Normalizations spelled out: SkipLayerNormalization, SkipSimplifiedLayerNormalization, and two of ai.onnx."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.pieces import over_root
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import is_contrib, is_standard
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewriting import GraphContext

_PLAIN, _SIMPLIFIED = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
_RMS, _GROUP, _DEFAULT_EPSILON = "RMSNormalization", "GroupNormalization", 1e-5
_SPELLING = Subject("spelling out a normalization")
_SINCE, _EPSILON, _SUM = 17, 1e-12, 3
"""The opset that LayerNormalization is there from, the default of both operators of sums, and the place of the sum among the
results."""


def is_skip_norm(node: ir.Node) -> bool:
    """Whether the node is one of the two operators of com.microsoft."""
    return is_contrib(node, _PLAIN, _SIMPLIFIED)


def is_standard_norm(node: ir.Node) -> bool:
    """Whether the node is a normalization of ai.onnx that can be spelled out."""
    return is_standard(node, _RMS, _GROUP)


def gives_sum(node: ir.Node) -> bool:
    """Whether the sum of such a node is used too."""
    return len(node.outputs) > _SUM and bool(node.outputs[_SUM].uses() or node.outputs[_SUM].is_graph_output())


def spell_out_norm(graph: GraphContext, node: ir.Node) -> bool:
    """Spells one out, verified; whether that could be done."""
    with graph.rewrite(node, _SPELLING) as edit:
        if is_standard_norm(node):
            result = (_rms_spelled if node.op_type == _RMS else _group_spelled)(graph.builder, node)
            edit.replace([(node.outputs[0], result)], [value for value in node.inputs[:1] if value is not None])
        else:
            total, result = _spelled(graph.builder, node)
            pairs = [(node.outputs[0], result), *([(node.outputs[_SUM], total)] if gives_sum(node) else [])]
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
        raise Refused("not-spelled", f"the statistics of {node.op_type} cannot be decomposed", node.name)
    total = build.elementwise("Add", [operand, skip], dtype)
    total = total if bias is None else build.elementwise("Add", [total, bias], dtype)
    epsilon = attribute(node, "epsilon", _EPSILON)
    if plain:
        if build.opset < _SINCE:
            raise Refused("old-opset", f"opset {build.opset} lacks LayerNormalization; raise it to {_SINCE}", node.name)
        inputs = [total, weight, *([] if shift is None else [shift])]
        return total, build.node("LayerNormalization", inputs, {"axis": -1, "epsilon": epsilon}, dims=dims, dtype=dtype)
    return total, build.elementwise("Mul", [over_root(build, total, dtype, [len(dims) - 1], epsilon), weight], dtype)


def _rms_spelled(build: Builder, node: ir.Node) -> ir.Value:
    """The result of an RMSNormalization, spelled out.

    Raises:
        Refused: Its shape or type is not known, or it is not computed in float32.
    """
    operand, dims, dtype = _normalized(build, node)
    weight = node.inputs[1]
    if weight is None or build.facts.dtype(weight) != dtype:
        raise Refused("malformed", "the types of what is normalized and of its weight differ, or are not known", node.name)
    first = attribute(node, "axis", -1) % len(dims)
    epsilon = attribute(node, "epsilon", _DEFAULT_EPSILON)
    return build.elementwise("Mul", [over_root(build, operand, dtype, range(first, len(dims)), epsilon), weight], dtype)


def _group_spelled(build: Builder, node: ir.Node) -> ir.Value:
    """A GroupNormalization spelled out: an InstanceNormalization of groups, and a factor and a summand for each channel.

    Raises:
        Refused: Its shape or type is not known, it is not computed in float32, or its factors are one for each group, as before
            opset 21.
    """
    operand, dims, dtype = _normalized(build, node)
    groups: int = attribute(node, "num_groups", 0)
    channels = dims[1]
    each = [None if value is None else build.facts.dims(value) for value in node.inputs[1:3]]
    if not isinstance(channels, int) or not groups or channels % groups or each != [(channels,), (channels,)]:
        raise Refused("not-spelled", f"{_GROUP} with factors that are not one for each channel cannot be decomposed", node.name)
    wide = build.cast(operand, ir.DataType.FLOAT)
    split = build.reshape(wide, [dims[0], groups, math.prod(dims[2:], start=channels // groups)])
    plain = [build.constant(np.full(groups, number, np.float32)) for number in (1.0, 0.0)]
    epsilon = {"epsilon": attribute(node, "epsilon", _DEFAULT_EPSILON)}
    inner = build.node("InstanceNormalization", [split, *plain], epsilon, dims=build.facts.dims(split), dtype=ir.DataType.FLOAT)
    result = build.cast(build.reshape(inner, dims), dtype)
    for op, value in zip(("Mul", "Add"), node.inputs[1:3], strict=True):
        assert value is not None
        result = build.elementwise(op, [result, build.reshape(value, [channels, *([1] * (len(dims) - 2))])], dtype)
    return result


def _normalized(build: Builder, node: ir.Node) -> tuple[ir.Value, Dims, ir.DataType]:
    """The input of a normalization of ai.onnx, its shape and its type.

    Raises:
        Refused: These are not known, or it is not computed in float32.
    """
    operand = node.inputs[0]
    dims = None if operand is None else build.facts.dims(operand)
    dtype = None if operand is None else build.facts.dtype(operand)
    if operand is None or dims is None or dtype is None:
        raise Refused("malformed", "the shape or the type of what is normalized is not known", node.name)
    if attribute(node, "stash_type", int(ir.DataType.FLOAT)) != ir.DataType.FLOAT:
        raise Refused("not-spelled", f"{node.op_type} that is not computed in float32 cannot be decomposed", node.name)
    return operand, dims, dtype
