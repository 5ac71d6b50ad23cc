"""Shapes of operators whose result has a shape of its own: made from sizes, or the size of something."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, subgraphs
from onnx_attnfuse.graph.facts_view import Dims, Known
from onnx_attnfuse.graph.rules.reading import ShapeRule, input_content, input_dims, requested_dims
from onnx_attnfuse.graph.sizes import Size


def _shape(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [(facts.fresh(node.outputs[0], 0),)]
    return [(len(dims[slice(attribute(node, "start", 0), attribute(node, "end"))]),)]


def _size(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return [()]


def _if(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Shapes of an If: of the branch that sizes choose, else the lengths that both agree on. Branches are read first."""
    chosen = input_content(node, 0, facts)
    branches = list(subgraphs(node))
    if isinstance(chosen, bool):
        branches = [node.attributes["then_branch" if chosen else "else_branch"].as_graph()]
    return [
        _agreed(output, [facts.dims(branch.outputs[index]) for branch in branches], facts)
        for index, output in enumerate(node.outputs)
    ]


def _agreed(output: ir.Value, shapes: Sequence[Dims | None], facts: Known) -> Dims | None:
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) < len(shapes) or len({len(shape) for shape in known}) > 1:
        return None
    columns = enumerate(zip(*known, strict=True))
    return tuple(column[0] if len(set(column)) == 1 else facts.fresh(output, axis) for axis, column in columns)


def _one_hot(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    axis: int = attribute(node, "axis", -1) % (len(dims) + 1)
    depth = input_content(node, 1, facts)
    return [(*dims[:axis], depth if isinstance(depth, (int, Size)) else facts.fresh(node.outputs[0], axis), *dims[axis:])]


def _range(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    start, limit, delta = (input_content(node, index, facts) for index in range(3))
    if isinstance(start, (int, Size)) and isinstance(limit, (int, Size)) and delta == 1:
        return [(limit - start,)]
    return [(facts.fresh(node.outputs[0], 0),)]


def _constant_of_shape(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return [requested_dims(node, 0, facts)]


MAKERS: dict[str, ShapeRule] = {
    "ConstantOfShape": _constant_of_shape,
    "If": _if,
    "OneHot": _one_hot,
    "Range": _range,
    "Shape": _shape,
    "Size": _size,
}
