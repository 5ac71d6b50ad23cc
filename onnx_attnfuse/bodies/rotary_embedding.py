"""RotaryEmbedding of com.microsoft and of the standard, decomposed."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.bodies.core import INTEGER, arithmetic, joined, places
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused


def body(fused: FusedNode) -> Body:
    """The operand with pairs of its channels turned.

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    fused.attribute("scale")  # no kernel of ONNX Runtime reads it
    operand = fused.operand("X" if is_standard(fused.node) else "input")
    cos, sin, positions = map(fused.given, ("cos_cache", "sin_cache", "position_ids"))
    if cos is None or sin is None:
        raise Refused("malformed", "the cosines or sines are missing", fused.node.name)
    build, dims = fused.build, fused.dims(operand)
    half = fused.number(fused.dims(cos)[-1], "the number of cosines of a position")
    if fused.attribute("rotary_embedding_dim", 0) not in {0, 2 * half}:
        raise Refused("malformed", "the cosines have another number of channels than the rotated part", fused.node.name)
    by_head = len(dims) == 4
    if not by_head and fused.attribute("rotary_embedding_dim", 0) and not fused.attribute("num_heads", 0):
        raise Refused("malformed", "rotary_embedding_dim without num_heads", fused.node.name)
    rows = dims[2] if by_head else dims[1]
    heads = fused.attribute("num_heads", 0)
    value = operand if by_head else build.reshape(operand, _split(fused, dims, half, heads))
    size = dims_of(build, value)[3]
    if not fused.attribute("rotary_embedding_dim", 0) and isinstance(size, int) and size != 2 * half:
        raise Refused("malformed", f"the cosines are of {2 * half} channels, and all {size} are turned", fused.node.name)
    tables = [_table(fused, table, positions, rows, by_head=by_head) for table in (cos, sin)]
    turned = rotated(build, value, tables[0], tables[1], half, interleaved=bool(fused.attribute("interleaved", 0)))
    return Body((turned if by_head else build.reshape(turned, dims),), (operand, cos, sin))


def _split(fused: FusedNode, dims: Dims, half: int, heads: int) -> Dims:
    """(b, s, n, h) of (b, s, n·h)."""
    width = fused.number(dims[2], "the width of the operand")
    size = fused.share(width, heads, "the head size") if heads else 2 * half
    return (*dims[:2], width // size, size)


def _table(fused: FusedNode, table: ir.Value, positions: ir.Value | None, rows: Dim, *, by_head: bool) -> ir.Value:
    """The rows of a table that are asked for, beside the axes of the operand."""
    build = fused.build
    if positions is not None and len(fused.dims(positions)) < 2:  # the first of them, in every entry
        first = build.cast(build.reshape(positions, ()), INTEGER)
        positions = arithmetic(build, "Add", places(build, rows), first)
    table = table if positions is None else looked_up(fused, table, positions)
    *leading, length, half = dims_of(build, table)
    if not leading:
        return build.reshape(table, (1, 1, length, half) if by_head else (1, length, 1, half))
    table = build.reshape(table, (*leading, length, 1, half))  # a batch may be empty, so no axis moves here
    return build.transpose(table, (0, 2, 1, 3)) if by_head else table


def looked_up(fused: FusedNode, table: ir.Value, positions: ir.Value) -> ir.Value:
    """Rows of a table at positions (s) or (b, s)."""
    build, found = fused.build, (*fused.dims(positions), fused.dims(table)[-1])
    return build.node("Gather", [table, positions], {"axis": 0}, dims=found, dtype=build.facts.dtype(table))


def rotated(build: Builder, value: ir.Value, cos: ir.Value, sin: ir.Value, half: int, *, interleaved: bool) -> ir.Value:
    """Four axes, the first channels of the last turned in pairs; tables that broadcast to them, `half` columns each."""
    dims, dtype = dims_of(build, value), build.facts.dtype(value)
    size = dims[3]
    if interleaved:
        first, second = (build.slice(value, 3, start, 2 * half, 2) for start in (0, 1))
    else:
        first, second = build.slice(value, 3, 0, half), build.slice(value, 3, half, 2 * half)

    def product(left: ir.Value, right: ir.Value) -> ir.Value:
        return build.elementwise("Mul", [left, right], dtype)

    pair = [
        build.elementwise("Sub", [product(first, cos), product(second, sin)], dtype),
        build.elementwise("Add", [product(first, sin), product(second, cos)], dtype),
    ]
    if interleaved:
        columns = [build.reshape(item, (*dims[:3], half, 1)) for item in pair]
        pair = [build.reshape(joined(build, columns, 4), (*dims[:3], 2 * half))]
    rest = [] if size == 2 * half else [build.slice(value, 3, 2 * half, size)]
    return pair[0] if len(pair) == 1 and not rest else joined(build, [*pair, *rest], 3)
