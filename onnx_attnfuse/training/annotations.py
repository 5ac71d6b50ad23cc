"""Shapes that a gradient graph is annotated with, which are not to be believed.

ONNX Runtime takes two lengths that meet in a broadcast for one, and writes that down: a mask of shape (b, 1, 1, t) is annotated
as (b, 4, s, s). So the lengths of what users feed are unknown here, and everything else follows from the operators; only
where those are not ONNX's own an annotation is all there is. Annotations come back when the graph has been read.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard


class Annotations:
    """The shapes that were taken out of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        """Takes the shapes out of the graph."""
        self._kept: list[tuple[ir.Value, ir.Shape]] = []
        for value in graph.inputs:
            if value.shape is not None and not value.shape.is_static():
                self._keep(value, ir.Shape([None] * len(value.shape)))
        for node in graph:
            for value in node.outputs if is_standard(node) else ():
                self._keep(value, None)

    def _keep(self, value: ir.Value, shape: ir.Shape | None) -> None:
        if value.shape is not None:
            self._kept.append((value, value.shape))
            value.shape = shape

    def restore(self) -> None:
        """Puts the shapes back."""
        for value, shape in self._kept:
            value.shape = shape
