"""Reads the element of a mask at index (b, n, i, j): executes the graph above the mask to a term.

The term is one over the indices and the values that are read (`mask_terms.py`). It is exact, not a guess: it holds for every
index and size.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.attention.masks.execution import MaskExecution
from onnx_attnfuse.attention.masks.mask_terms import element_of, factors_of, normal
from onnx_attnfuse.attention.masks.operators import is_form
from onnx_attnfuse.certify.arrays import Index, Unsupported
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import Term
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
