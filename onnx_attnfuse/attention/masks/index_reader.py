"""Reads the element of a mask at index (b, n, i, j): executes the graph above the mask to a term.

The term is one over the indices and the values that are read (`mask_terms.py`). It is exact, not a guess: it holds for every
index and size.

`scattered_to` asks the same of a node that writes into a tensor: where ScatterND, ScatterElements and TensorScatter put each
element of the updates, `result[place(i)] = updates[i]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.masks.execution import MaskExecution
from onnx_attnfuse.attention.masks.mask_terms import element_of, factors_of, normal
from onnx_attnfuse.attention.masks.operators import is_form
from onnx_attnfuse.certify.arrays import Index, Unsupported
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import Term, add, number
from onnx_attnfuse.graph.constants import attribute, needed
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim


class Reader:
    """Reads elements of values of one graph.

    Args:
        facts: Shapes, types and contents of its values.
        end: A value that is not looked into.
    """

    def __init__(self, facts: Facts, end: ir.Value | None = None) -> None:
        self.facts, self._end = facts, end
        self._known: dict[tuple[ir.Value, Index], Term] = {}
        self._runs: dict[frozenset[Dim], MaskExecution] = {}
        self._ending: dict[ir.Value, Reader] = {}

    def ending(self, end: ir.Value) -> Reader:
        """A reader of the same graph that does not look into a value, one for all who ask."""
        return self._ending.setdefault(end, Reader(self.facts, end))

    def element(self, value: ir.Value, at: Iterable[Term]) -> Term:
        """The element of `value` at an index given as one integer per axis."""
        at = tuple(at)
        key = (value, at)
        if key not in self._known:
            with aside():
                self._known[key] = self._read(value, at)
        return self._known[key]

    def _read(self, value: ir.Value, at: Index) -> Term:
        present = frozenset(factor.size for item in at for factor in factors_of(item))
        if present not in self._runs:
            self._runs[present] = MaskExecution(self.facts, present, self._end)
        try:
            if all(map(is_form, at)):
                return normal(self._runs[present].array(value).at(*at))
        except Unsupported:
            pass
        return element_of(value, at, self.facts.dtype(value))


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
    indices = needed(node, 1)
    dims = reader.facts.dims(indices)
    count = 0 if dims is None else len(dims) - 1
    if dims is None or count < 1 or dims[count] != count:
        return where
    at = where[:count]
    return [*(reader.element(indices, (*at, number(axis))) for axis in range(count)), *where[count:]]


def _scatter_elements(node: ir.Node, where: Sequence[Term], reader: Reader) -> Sequence[Term]:
    axis: int = attribute(node, "axis", 0) % len(where)
    form = reader.element(needed(node, 1), where)
    return [form if place == axis else item for place, item in enumerate(where)]


def _tensor_scatter(node: ir.Node, where: Sequence[Term], reader: Reader) -> Sequence[Term]:
    axis: int = attribute(node, "axis", -2) % len(where)
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return where
    first = reader.element(node.inputs[2], where[:1])
    return [add(item, first) if place == axis and is_form(first) else item for place, item in enumerate(where)]


_TARGETS = {"ScatterND": _scatter_nd, "ScatterElements": _scatter_elements, "TensorScatter": _tensor_scatter}
