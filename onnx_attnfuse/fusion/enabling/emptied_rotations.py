"""Queries that are 0 in some rows, rotated by tables that are 0 there: nothing has to read and write all queries once more.

    where(test, 0, rotate(q, cos, sin))  =  rotate(q, where(test, 0, cos), where(test, 0, sin))

Rows without a key have queries of 0 where their scores have to be equal. Tables are as long as a head, which all heads share, and
one pair of them serves all layers. They get a row for each position of each entry if the test differs by entry.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.emptied_rows import EmptiedRows
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB, is_contrib
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.operators.rotary_embedding import INFO
from onnx_attnfuse.targets.rotary import counted_rows


def with_emptied_rotation(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """RotaryEmbedding with tables that are 0 in the rows in which its result is emptied."""
    facts = builder.facts
    found = _Emptied.read(node, facts)
    if found is None:
        return None
    batch, rows = found.sizes
    dtype = facts.dtype(found.cos)
    zero, test = builder.scalar(0.0, dtype), builder.reshape(found.test, [*found.tested, 1])
    tables = [builder.elementwise("Where", [test, zero, found.by_rows(table, builder)]) for table in (found.cos, found.sin)]
    dims = facts.dims(tables[0])
    assert dims is not None
    if facts.same(dims[0], 1):
        places, count = builder.constant([0]), rows
    else:
        places, count = found.positions if found.is_counted(facts) else counted_rows(builder, batch, rows), batch * rows
    cos, sin = (builder.reshape(table, [count, dims[-1]]) for table in tables)
    result = node.outputs[0]
    rotated = builder.node(
        INFO.name, [found.query, places, cos, sin], attributes(found.rotation), domain=CONTRIB, hint=found.rotation.name
    )
    return EnablingChange(((result, rotated),), (found.query, found.positions, found.cos, found.sin, found.test))


@dataclasses.dataclass(frozen=True)
class _Emptied:
    """A RotaryEmbedding whose result nobody sees but a node that has 0 in some rows."""

    rotation: ir.Node
    query: ir.Value
    positions: ir.Value
    cos: ir.Value
    sin: ir.Value
    test: ir.Value
    sizes: tuple[Dim, Dim]
    """Entries of the batch, and rows of each."""
    tested: tuple[Dim, Dim]
    """Lengths of these axes in the test, each of which may be 1."""

    @staticmethod
    def read(node: ir.Node, facts: Facts) -> _Emptied | None:
        """The rows and the operator; None where some channels are not rotated, or the test differs by head or channel."""
        emptied = EmptiedRows.read(node)
        if emptied is None:
            return None
        zero = np.zeros(1) if emptied.filling is None else constant_array(emptied.filling, limit=1)
        rotation, test = emptied.rows.producer(), emptied.test
        if zero is None or zero.any() or not is_contrib(rotation, INFO.name):
            return None
        result = rotation.outputs[0]
        dims, tested = facts.dims(result), facts.dims(test)
        if len(result.uses()) != 1 or result.is_graph_output() or dims is None or tested is None or len(tested) != len(dims):
            return None
        query, positions, cos, sin = rotation.inputs[:4]
        if query is None or positions is None or cos is None or sin is None or facts.dims(node.outputs[0]) != dims:
            return None
        row = len(dims) - 2
        if any(size != 1 for place, size in enumerate(tested) if place not in {0, row}):
            return None
        found = _Emptied(rotation, query, positions, cos, sin, test, (dims[0], dims[row]), (tested[0], tested[row]))
        return found if found._rotates_all(dims[-1], facts) and found._has_rows(facts) else None

    def _rotates_all(self, width: Dim, facts: Facts) -> bool:
        """Whether every channel is rotated, so that a row of zeros in the tables leaves nothing."""
        heads, rank = attribute(self.rotation, "num_heads", 0), len(facts.dims(self.query) or ())
        tables = [facts.dims(table) for table in (self.cos, self.sin)]
        if not isinstance(width, int) or tables[0] is None or tables[0] != tables[1] or len(tables[0]) != 2:
            return False
        channels = width if rank == 4 else width // heads if heads else 0
        return tables[0][1] == channels / 2 and attribute(self.rotation, "rotary_embedding_dim", 0) in {0, channels}

    def _has_rows(self, facts: Facts) -> bool:
        """Whether the rows of the tables are known: counted from 0, or by an index for each position of each entry."""
        batch, rows = self.sizes
        return facts.dims(self.positions) == (batch, rows) or self._counts_from_zero(facts)

    def _counts_from_zero(self, facts: Facts) -> bool:
        """Whether the first row of the tables is that of the first query, and there are no more than queries."""
        first, table = constant_array(self.positions, limit=1), facts.dims(self.cos)
        if first is None or table is None or first.shape != (1,) or first[0] != 0:
            return False
        return facts.same(table[0], self.sizes[1])

    def is_counted(self, facts: Facts) -> bool:
        """Whether the tables have a row for each position of each entry, in order."""
        shaped, (batch, rows) = self.positions.producer(), self.sizes
        counted = shaped.inputs[0] if is_standard(shaped, "Reshape") else None
        node, table = None if counted is None else counted.producer(), facts.dims(self.cos)
        if counted is None or table is None or not is_standard(node, "Range"):
            return False
        start, _, step = (constant_array(item, limit=1) for item in node.inputs)
        if start is None or step is None or start.item() != 0 or step.item() != 1:
            return False
        total = batch * rows
        return facts.same(table[0], total) and facts.dims(counted) == (total,) and facts.dims(self.positions) == (batch, rows)

    def by_rows(self, table: ir.Value, builder: Builder) -> ir.Value:
        """A table as (b or 1, s, pair)."""
        facts, (batch, rows) = builder.facts, self.sizes
        dims = facts.dims(table)
        assert dims is not None
        if self._counts_from_zero(facts):
            return builder.reshape(table, [1, rows, dims[1]])
        if self.is_counted(facts):
            return builder.reshape(table, [batch, rows, dims[1]])
        inputs = [table, self.positions]
        return builder.node("Gather", inputs, {"axis": 0})
