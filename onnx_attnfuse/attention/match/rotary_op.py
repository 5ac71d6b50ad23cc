"""RotaryEmbedding nodes that are given positions, of ai.onnx and of com.microsoft, read as the rotation they are.

Those of ai.onnx with a row of the tables for each of their own are read as decomposed ones are (`rotary`).
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import Rotary, Table
from onnx_attnfuse.graph.constants import attribute, given, has_unknown_attribute, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib

_Caches = tuple[Table, Table, IndexedValue]


def read_rotary_node(indexed: IndexedValue, channels: Axis, facts: Facts) -> tuple[IndexedValue, Rotary] | None:
    """The input of a RotaryEmbedding node, laid out like its result, and the rotation; None for other nodes."""
    node, size = indexed.value.producer(), length(channels)
    if not (is_standard(node, "RotaryEmbedding") or is_contrib(node, "RotaryEmbedding")) or has_unknown_attribute(node):
        return None
    if facts.dtype(indexed.value) not in FLOATS_TO_32 or not _has_heads(indexed, channels, node):
        return None
    source = given(node, 0)
    caches = _caches(node, (indexed.axes[0], indexed.axes[-2]), facts)
    if source is None or caches is None or attribute(node, "scale", 1.0) != 1.0 or attribute(node, "is_packed_batching", 0):
        return None
    cos, sin, positions = caches
    width: int | None = attribute(node, "rotary_embedding_dim", 0) or (size if isinstance(size, int) else None)
    if width is None or any(length(table.indexed.axes[1]) * 2 != width for table in (cos, sin)):
        return None
    interleaved = bool(attribute(node, "interleaved", 0))
    return IndexedValue(source, indexed.axes), Rotary(cos, sin, leaves(channels), width, interleaved, positions, (node,))


def _has_heads(indexed: IndexedValue, channels: Axis, node: ir.Node) -> bool:
    """Whether the node takes the innermost axis as a head's channels, as the attention does."""
    own, inner = leaves(indexed.axes[-1]), leaves(channels)
    if len(indexed.axes) == 4:
        return own == inner
    heads: int = attribute(node, "num_heads", 0)
    return len(indexed.axes) == 3 and own[-len(inner) :] == inner and (not heads or length(own) == length(inner) * heads)


def _caches(node: ir.Node, axes: Axes, facts: Facts) -> _Caches | None:
    order = (1, 2, 3) if is_standard(node) else (2, 3, 1)
    cos, sin, positions = (given(node, place) for place in order)
    dims = None if positions is None else facts.dims(positions)
    if cos is None or sin is None or positions is None or dims is None:
        return None
    tables: list[Table] = []
    for value in (cos, sin):
        shape = facts.dims(value)
        if shape is None or len(shape) != 2:
            return None
        tables.append(Table(IndexedValue(value, ((Factor(shape[0]),), (Factor(shape[1]),))), 1))
    if len(dims) == 2:
        places = tuple(() if dim == 1 else axis for dim, axis in zip(dims, axes, strict=True))
        return tables[0], tables[1], IndexedValue(positions, places)
    return (tables[0], tables[1], IndexedValue(positions, ((),))) if dims == (1,) else None
