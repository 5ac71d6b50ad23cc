"""Rows of tokens that are rotated before they are put back in their places, and not after: there are fewer of them.

    RestorePadding ─ RotaryEmbedding(positions (b, s))     RotaryEmbedding(positions of the rows) ─ RestorePadding

A rotation leaves 0 as it is, and RestorePadding has 0 elsewhere. The operator takes no more tokens than its tables have
rows, so that the rows are passed in parts of that length, as entries.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, attributes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib

_LONGEST, _SHORTEST = 512, 8
"""Rows of a part."""
_INDEX = ir.DataType.INT64


@enabling("rows of tokens rotated before they are put back in their places", "com.microsoft.RotaryEmbedding", "rotated-rows")
def with_rotated_rows(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """RestorePadding of rotated rows, in the place of a rotation of its result."""
    facts = builder.facts
    if len(node.inputs) != 4 or attribute(node, "is_packed_batching", 0):
        return None
    x, positions, *tables = node.inputs
    restoring = None if x is None or len(x.uses()) > 1 or x.is_graph_output() else x.producer()
    if restoring is None or not is_contrib(restoring, "RestorePadding") or positions is None:
        return None
    rows, offset = restoring.inputs
    whole, count = _numbers(node.outputs[0], facts), None if rows is None else (_numbers(rows, facts) or (None,))[0]
    lengths = [(facts.dims(table) or (None,))[0] for table in tables if table is not None]
    known = [size for size in lengths if isinstance(size, int)]
    if rows is None or offset is None or whole is None or len(whole) != 3 or count is None or len(known) != len(tables):
        return None
    part = math.gcd(count, _LONGEST)
    while part > min(known):
        part //= 2
    own = _positions(positions, offset, whole, count, builder)
    if part < _SHORTEST or own is None:
        return None
    shape, width = [count // part, part], whole[2]
    inputs = [builder.reshape(rows, [*shape, width]), builder.reshape(own, shape), *tables]
    kept, domain = attributes(node), node.domain
    turned = builder.node(node.op_type, inputs, kept, domain=domain, hint=node.name)
    flat = builder.reshape(turned, [count, width])
    hint = f"{node.name}/RestorePadding"
    restored = builder.node("RestorePadding", [flat, offset], domain=domain, dims=whole, hint=hint)
    frontier = (rows, offset, positions, *(table for table in tables if table is not None))
    return EnablingChange(((node.outputs[0], restored),), frontier)


def _numbers(value: ir.Value, facts: Facts) -> tuple[int, ...] | None:
    """The shape of a value where all sizes are numbers."""
    dims = facts.dims(value)
    sizes = tuple(size for size in dims or () if isinstance(size, int))
    return sizes if dims is not None and len(sizes) == len(dims) else None


def _positions(positions: ir.Value, offset: ir.Value, whole: tuple[int, ...], count: int, builder: Builder) -> ir.Value | None:
    """The position of each row, from those of each place, or from the first of all entries."""
    (batch, length, _), known = whole, _numbers(positions, builder.facts)
    taken = builder.cast(builder.slice(builder.reshape(offset, [batch * length]), 0, 0, count), _INDEX)
    if known == (batch, length):
        flat = builder.reshape(positions, [batch * length])
        return builder.node("Gather", [flat, taken], {"axis": 0})
    if known != (1,):
        return None
    place = builder.elementwise("Mod", [taken, builder.constant(np.asarray(length))])
    return builder.elementwise("Add", [place, positions])
