"""RotaryEmbedding nodes that are given positions, of ai.onnx and of com.microsoft, read as the rotation they are.

Those of ai.onnx with a row of the tables for each of their own are read with all that is spelled out (`forms`).
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.axes.factors import Axes, Axis, Factor, leaves, length
from onnx_attnfuse.axes.views import Laid
from onnx_attnfuse.graph.constants import attribute, has_unknown_attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import given
from onnx_attnfuse.match.forms import FLOATS
from onnx_attnfuse.spec import Rotary, Table

_Caches = tuple[Table, Table, Laid]


def read_rotary_node(laid: Laid, channels: Axis, facts: Facts) -> tuple[Laid, Rotary] | None:
    """What the node rotates, laid out like its result, and the rotation; None if there is no such node, or it does more."""
    node, size = laid.value.producer(), length(channels)
    if node is None or node.op_type != "RotaryEmbedding" or has_unknown_attribute(node):
        return None
    if facts.dtype(laid.value) not in FLOATS or not _has_heads(laid, channels, node):
        return None
    source = given(node, 0)
    caches = _caches(node, (laid.axes[0], laid.axes[-2]), facts)
    if source is None or caches is None or attribute(node, "scale", 1.0) != 1.0 or attribute(node, "is_packed_batching", 0):
        return None
    cos, sin, positions = caches
    width: int | None = attribute(node, "rotary_embedding_dim", 0) or (size if isinstance(size, int) else None)
    if width is None or any(length(table.laid.axes[1]) * 2 != width for table in (cos, sin)):
        return None
    interleaved = bool(attribute(node, "interleaved", 0))
    return Laid(source, laid.axes), Rotary(cos, sin, leaves(channels), width, interleaved, positions, (node,))


def _has_heads(laid: Laid, channels: Axis, node: ir.Node) -> bool:
    """Whether the node takes what lies innermost as a head's channels, as the attention does."""
    own, inner = leaves(laid.axes[-1]), leaves(channels)
    if len(laid.axes) == 4:
        return own == inner
    heads: int = attribute(node, "num_heads", 0)
    return len(laid.axes) == 3 and own[-len(inner) :] == inner and (not heads or length(own) == length(inner) * heads)


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
        tables.append(Table(Laid(value, ((Factor(shape[0]),), (Factor(shape[1]),))), 1))
    if len(dims) == 2:
        places = tuple(() if dim == 1 else axis for dim, axis in zip(dims, axes, strict=True))
        return tables[0], tables[1], Laid(positions, places)
    return (tables[0], tables[1], Laid(positions, ((),))) if dims == (1,) else None
