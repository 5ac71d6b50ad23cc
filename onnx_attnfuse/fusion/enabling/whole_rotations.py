"""Tokens that are not rotated, in front of those that are: rotated with them, by a cosine of 1 and a sine of 0.

    Split ─ RotaryEmbedding of all but the first P ─ Concat     RotaryEmbedding with P rows of 1 and 0 before its tables

So nothing is cut off and joined again, as for the class token and the registers of a vision transformer. Where heads were brought
to the front for that alone, the operator takes (batch, tokens, heads · channels). Equal for finite numbers.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import only_use
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib
from onnx_attnfuse.graph.rules.reading import slice_bounds

_TOKENS, _HEADS_FIRST = 2, [0, 2, 1, 3]
"""The axis of tokens where heads come before them."""


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """A rotation of all tokens but the first ones, as (batch, heads, tokens, channels)."""

    whole: ir.Value
    prefix: int
    rotary: ir.Node


@enabling("rotations of all but the first tokens rewritten as rotations of all", "Concat", "whole-rotations")
def with_whole_rotation(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A Concat of the first tokens and the others, rotated, as a rotation of all."""
    facts, found = builder.facts, _read(node, builder.facts)
    if found is None:
        return None
    _, positions, *tables = found.rotary.inputs
    rows = [_with_rows(table, found.prefix, content, builder) for table, content in zip(tables, (1.0, 0.0), strict=True)]
    flat, result = _flat(found.whole, node.outputs[0], facts), node.outputs[0]
    x, result = (found.whole, result) if flat is None else flat
    kept = attributes(found.rotary)
    if flat is not None:
        kept["num_heads"] = (facts.dims(found.whole) or (0, 0))[1]
    inputs = [x, positions, *rows]
    domain = found.rotary.domain
    new = builder.node(found.rotary.op_type, inputs, kept, domain=domain, hint=found.rotary.name)
    frontier = (x, *(table for table in tables if table is not None))
    return EnablingChange(((result, new),), frontier)


def _read(node: ir.Node, facts: Facts) -> _Rotation | None:
    """The parts that a Concat joins, where that is a rotation of all tokens but the first ones."""
    if len(node.inputs) != 2 or attribute(node, "axis") not in {_TOKENS, _TOKENS - 4}:
        return None
    first, second = node.inputs
    rotary = None if second is None else second.producer()
    if first is None or second is None or rotary is None or not is_contrib(rotary, "RotaryEmbedding") or len(second.uses()) != 1:
        return None
    rest, positions, *tables = rotary.inputs
    starts = constant_array(positions, limit=1)
    if rest is None or len(tables) != 2 or starts is None or starts.any() or facts.rank(rest) != 4:
        return None
    if attribute(rotary, "is_packed_batching", 0) or any(table is None or facts.rank(table) != 2 for table in tables):
        return None
    prefix, whole = (facts.dims(first) or (None,) * 3)[_TOKENS], _source(first)
    if (
        whole is None
        or whole is not _source(rest)
        or not isinstance(prefix, int)
        or facts.dims(whole) != facts.dims(node.outputs[0])
    ):
        return None
    if not _is_cut(first, rest, prefix, facts) or not all(
        isinstance((facts.dims(table) or ("",))[-1], int) for table in tables if table is not None
    ):
        return None
    return _Rotation(whole, prefix, rotary)


def _source(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    return node.inputs[0] if is_standard(node, "Slice", "Split") else None


def _is_cut(first: ir.Value, rest: ir.Value, prefix: int, facts: Facts) -> bool:
    """Whether two pieces of a value are its first tokens and all others."""
    one, other = first.producer(), rest.producer()
    assert one is not None
    assert other is not None
    if one is other:
        return tuple(one.outputs) == (first, rest) and attribute(one, "axis", 0) % 4 == _TOKENS
    if one.op_type != "Slice" or other.op_type != "Slice":
        return False
    dims = facts.dims(rest)
    bounds = [slice_bounds(node, 4, facts) or {} for node in (one, other)]
    if dims is None or any(list(item) != [_TOKENS] or item[_TOKENS][2] != 1 for item in bounds):
        return False
    whole = one.inputs[0]
    total = (None if whole is None else facts.dims(whole)) or (0, 0, 0)
    return bounds[0][_TOKENS][0] == 0 and bounds[1][_TOKENS][0] == prefix and facts.same(dims[_TOKENS] + prefix, total[_TOKENS])


def _with_rows(table: ir.Value | None, count: int, number: float, builder: Builder) -> ir.Value:
    """A table with rows of one number in front."""
    assert table is not None
    dims, dtype = builder.facts.dims(table), builder.facts.dtype(table)
    assert dims is not None
    assert dtype is not None
    assert isinstance(dims[1], int)
    rows = builder.constant(np.full((count, dims[1]), number, dtype.numpy()))
    return builder.node("Concat", [rows, table], {"axis": 0})


def _flat(whole: ir.Value, joined: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """The value before heads go to the front, and that after they are back; None where they are in front for others too."""
    turning, back = whole.producer(), only_use(joined, "Transpose")
    if not is_standard(turning, "Transpose") or back is None or turning.inputs[0] is None:
        return None
    if attribute(turning, "perm") != _HEADS_FIRST or attribute(back, "perm") != _HEADS_FIRST:
        return None
    parted, again = turning.inputs[0].producer(), only_use(back.outputs[0], "Reshape")
    if not is_standard(parted, "Reshape") or again is None or parted.inputs[0] is None:
        return None
    x, result = parted.inputs[0], again.outputs[0]
    return (x, result) if facts.rank(x) == 3 and facts.dims(x) == facts.dims(result) else None
