"""Slices that together are all of a tensor, each assigned by itself, as one Concat.

    zeros[..., :a] = x; zeros[..., a:] = y        is        Concat(x, y)

Exporters write each assignment as a ScatterND along the first axis, between two Transposes.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor, new_axes, refined
from onnx_attnfuse.attention.axes.views import IndexedValue, views_above
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.mask_terms import index
from onnx_attnfuse.certify.terms import ZERO, subtract
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts


@dataclasses.dataclass(frozen=True)
class _Assigned:
    """A part of the first axis that gets other elements."""

    into: ir.Value
    start: int
    length: int
    part: ir.Value


@enabling("assignments to slices joined", "ScatterND", None)
def as_joined_parts(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A Concat in the place of the last assignment of those that write every element, each once."""
    facts, result = builder.facts, node.outputs[0]
    dims, found = facts.dims(result), list[_Assigned]()
    value = result
    while (one := _assigned(value, facts)) is not None:
        found.append(one)
        value = _before(one.into, facts)
    found.sort(key=lambda item: item.start)
    ends = [0, *(item.start + item.length for item in found)]
    if not dims or len(found) < 2 or ends[:-1] != [item.start for item in found] or ends[-1] != dims[0]:
        return None
    parts = [item.part for item in found]
    joined = builder.node("Concat", parts, {"axis": 0}, dims=dims, dtype=facts.dtype(result))
    return EnablingChange(((result, joined),), tuple(parts))


def _assigned(value: ir.Value, facts: Facts) -> _Assigned | None:
    """The assignment of constant places, one after the other, of which a value is the result."""
    node = value.producer()
    if not is_standard(node, "ScatterND") or attribute(node, "reduction", "none") != "none":
        return None
    into, indices, part = node.inputs
    dims = facts.dims(indices)
    if into is None or indices is None or part is None or dims is None or len(dims) != 2 or dims[1] != 1:
        return None
    if not isinstance(dims[0], int):
        return None
    here = index(Factor(dims[0]))
    start = subtract(Reader(facts).element(indices, (here, ZERO)), here)
    return _Assigned(into, int(start.data), dims[0], part) if start.op == "const" else None


def _before(value: ir.Value, facts: Facts) -> ir.Value:
    """The value furthest up that Transposes bring back to what it was."""
    dims = facts.dims(value)
    if dims is None:
        return value
    whole = IndexedValue(value, new_axes(dims))
    return [item.value for item in views_above(whole, facts) if refined(item.axes) == refined(whole.axes)][-1]
