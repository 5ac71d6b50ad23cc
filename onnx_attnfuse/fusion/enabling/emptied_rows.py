"""Rows that a test empties, as `targets/masked_row_fixups.py` writes them: by a Where, or by a product with 0, which keeps NaN.

where(test, filling, rows)        rows · cast(not test)        rows · cast(not test) + cast(test) · filling
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard


@dataclasses.dataclass(frozen=True)
class EmptiedRows:
    """Rows that get another content where a test holds."""

    test: ir.Value
    rows: ir.Value
    filling: ir.Value | None
    """The content; None is 0."""
    keeps_nan: bool

    @staticmethod
    def read(node: ir.Node | None) -> EmptiedRows | None:
        """The last node of each form."""
        if is_standard(node, "Where"):
            test, filling, rows = node.inputs
            return None if test is None or rows is None else EmptiedRows(test, rows, filling, keeps_nan=False)
        if is_standard(node, "Mul"):
            rows, kept = node.inputs
            test = _input_of(_input_of(kept, "Cast"), "Not")
            return None if test is None or rows is None else EmptiedRows(test, rows, None, keeps_nan=True)
        if not is_standard(node, "Add"):
            return None
        product, added = node.inputs
        found, dropped = (None if item is None else item.producer() for item in (product, added))
        found = EmptiedRows.read(found) if is_standard(found, "Mul") else None
        if found is None or not is_standard(dropped, "Mul") or _input_of(dropped.inputs[0], "Cast") is not found.test:
            return None
        return dataclasses.replace(found, filling=dropped.inputs[1])

    def emptied(self, value: ir.Value, test: ir.Value, builder: Builder) -> ir.Value:
        """Another value that is 0 where a test holds."""
        dtype = builder.facts.dtype(value)
        assert dtype is not None
        if not self.keeps_nan:
            return builder.elementwise("Where", [test, builder.scalar(0.0, dtype), value])
        return builder.elementwise("Mul", [value, builder.cast(builder.elementwise("Not", [test]), dtype)])


def _input_of(value: ir.Value | None, op: str) -> ir.Value | None:
    """The first input of the node that computes a value, if it is an `op` of the standard."""
    node = None if value is None else value.producer()
    return node.inputs[0] if is_standard(node, op) else None
