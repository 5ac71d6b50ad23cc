"""Where a node that writes into a tensor puts each element of the updates, as formulas of the element's own index.

The question is the same for ScatterND, ScatterElements and TensorScatter: `result[place(i)] = updates[i]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.operators import is_form
from onnx_attnfuse.certify.terms import Term, add, number
from onnx_attnfuse.graph.constants import attribute


def scattered_to(node: ir.Node, where: Sequence[Term], reader: Reader) -> Sequence[Term]:
    """The index in the result of a ScatterND, ScatterElements or TensorScatter of an element of the updates.

    Args:
        node: The node.
        where: The index of the element in the updates, one form for each axis.
        reader: Reads the indices.

    Returns:
        One form for each axis of the result; `where` itself where the indices are of a shape that is not read.
    """
    return _TARGETS[node.op_type](node, where, reader)


def _scatter_nd(node: ir.Node, where: Sequence[Term], reader: Reader) -> Sequence[Term]:
    """Rows of indices, each of as many leading axes of the buffer as indices have axes besides."""
    indices = _input(node, 1)
    dims = reader.facts.dims(indices)
    count = 0 if dims is None else len(dims) - 1
    if dims is None or count < 1 or dims[count] != count:
        return where
    at = where[:count]
    return [*(reader.element(indices, (*at, number(axis))) for axis in range(count)), *where[count:]]


def _scatter_elements(node: ir.Node, where: Sequence[Term], reader: Reader) -> Sequence[Term]:
    axis: int = attribute(node, "axis", 0) % len(where)
    form = reader.element(_input(node, 1), where)
    return [form if place == axis else item for place, item in enumerate(where)]


def _tensor_scatter(node: ir.Node, where: Sequence[Term], reader: Reader) -> Sequence[Term]:
    axis: int = attribute(node, "axis", -2) % len(where)
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return where
    first = reader.element(node.inputs[2], where[:1])
    return [add(item, first) if place == axis and is_form(first) else item for place, item in enumerate(where)]


_TARGETS = {"ScatterND": _scatter_nd, "ScatterElements": _scatter_elements, "TensorScatter": _tensor_scatter}


def _input(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value
