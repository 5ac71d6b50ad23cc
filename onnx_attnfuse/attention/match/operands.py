"""Operands as views of other values, and the result as others view it: the places where a fused operator may be connected."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, is_short, upward
from onnx_attnfuse.attention.match.rotary import read_rotary
from onnx_attnfuse.attention.match.rotary_op import read_rotary_node
from onnx_attnfuse.attention.spec import Source
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.uses import viewers

_MAX_VIEW_CHAIN = 24
"""Views are followed this far; longer chains do not occur and would only cost time."""


def sources(operand: IndexedValue, facts: Facts, channels: Axis = (), *, plain: bool = False) -> tuple[Source, ...]:
    """The operand and everything it is a view of, nearest first.

    Args:
        operand: The operand.
        facts: Shapes of the graph.
        channels: The channels that queries and keys may be rotated in; none for values.
        plain: Stop where it is multiplied; else factors that are plain numbers are gathered on the way.
    """
    found = [Source(operand)]
    while len(found) < _MAX_VIEW_CHAIN:
        further = _further(found[-1], facts, channels, plain=plain)
        if further is None:
            break
        found.append(further)
    return tuple(found)


def _further(source: Source, facts: Facts, channels: Axis, *, plain: bool) -> Source | None:
    """The source one step further up: after a view, or after a scaling or rotation that a fused operator can do itself."""
    if is_short(source.indexed, facts):
        return None
    view = upward(source.indexed, facts, selecting=True) or _widened(source.indexed, facts)
    if view is not None:
        return dataclasses.replace(source, indexed=view)
    return (None if plain else _scaled(source, facts)) or _rotated(source, facts, channels)


def _rotated(source: Source, facts: Facts, channels: Axis) -> Source | None:
    """The source that a rotary embedding rotates, with that embedding; None if `source` has one already."""
    if source.rotary is not None or not channels:
        return None
    found = read_rotary(source.indexed, channels, facts) or read_rotary_node(source.indexed, channels, facts)
    return None if found is None else dataclasses.replace(source, indexed=found[0], rotary=found[1])


def _widened(indexed: IndexedValue, facts: Facts) -> IndexedValue | None:
    """The half-precision value that was cast to float32, which loses nothing."""
    node = indexed.value.producer()
    if not is_standard(node, "Cast") or node.inputs[0] is None:
        return None
    before = facts.dtype(node.inputs[0])
    if facts.dtype(indexed.value) != ir.DataType.FLOAT or before not in HALVES:
        return None
    return IndexedValue(node.inputs[0], indexed.axes)


def _scaled(source: Source, facts: Facts) -> Source | None:
    scaling = read_scaling(source.indexed.value.producer(), facts)
    if scaling is None or facts.rank(scaling.tensor) != len(source.indexed.axes):
        return None
    indexed = IndexedValue(scaling.tensor, source.indexed.axes)
    return dataclasses.replace(source, indexed=indexed, factor=scaling.of(source.factor))


def readings(result: IndexedValue, facts: Facts) -> tuple[IndexedValue, ...]:
    """The result and the views of it that alone look at it."""
    found = [result]
    while len(found) < _MAX_VIEW_CHAIN:
        last = found[-1]
        followers = viewers(last.value)
        if last.value.is_graph_output() or len(followers) != 1:
            break
        view = downward(followers[0], last.axes, facts)
        if view is None:
            break
        found.append(view)
    return tuple(found)
