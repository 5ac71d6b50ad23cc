"""What an operand is a view of, and what the result is viewed as: the places where a fused operator may be connected."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.axes.factors import Axis
from onnx_attnfuse.axes.views import Laid, downward, is_short, upward
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.match.rotary import read_rotary
from onnx_attnfuse.match.rotary_op import read_rotary_node
from onnx_attnfuse.spec import Source

_FURTHEST = 24
"""Views are followed this far; longer chains do not occur and would only cost time."""


def sources(operand: Laid, facts: Facts, channels: Axis = (), *, plain: bool = False) -> tuple[Source, ...]:
    """The operand and everything it is a view of, nearest first.

    Args:
        operand: The operand.
        facts: Shapes of the graph.
        channels: The channels that queries and keys may be rotated in; none for values.
        plain: Stop where it is multiplied; else factors that are plain numbers are gathered on the way.
    """
    found = [Source(operand)]
    while len(found) < _FURTHEST:
        further = _further(found[-1], facts, channels, plain=plain)
        if further is None:
            break
        found.append(further)
    return tuple(found)


def _further(source: Source, facts: Facts, channels: Axis, *, plain: bool) -> Source | None:
    """What a source is a view of, or is computed from in a way that an operator can make up for."""
    if is_short(source.laid, facts):
        return None
    view = upward(source.laid, facts, selecting=True) or _widened(source.laid, facts)
    if view is not None:
        return dataclasses.replace(source, laid=view)
    return (None if plain else _scaled(source, facts)) or _rotated(source, facts, channels)


def _rotated(source: Source, facts: Facts, channels: Axis) -> Source | None:
    """What is rotated; of what is rotated twice, what it is in between."""
    if source.rotary is not None or not channels:
        return None
    found = read_rotary(source.laid, channels, facts) or read_rotary_node(source.laid, channels, facts)
    return None if found is None else dataclasses.replace(source, laid=found[0], rotary=found[1])


def _widened(laid: Laid, facts: Facts) -> Laid | None:
    """What float32 numbers were before, which lost nothing on the way."""
    node = laid.value.producer()
    if not is_standard(node, "Cast") or node.inputs[0] is None:
        return None
    before = facts.dtype(node.inputs[0])
    if facts.dtype(laid.value) != ir.DataType.FLOAT or before not in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        return None
    return Laid(node.inputs[0], laid.axes)


def _scaled(source: Source, facts: Facts) -> Source | None:
    node = source.laid.value.producer()
    if not is_standard(node, "Mul", "Div"):
        return None
    for index in (0, 1) if node.op_type == "Mul" else (1,):
        number, other = node.inputs[index], node.inputs[1 - index]
        factor = facts.number(number) if number is not None else None
        if other is None or not factor or facts.rank(other) != len(source.laid.axes):
            continue
        if facts.dtype(other) != facts.dtype(source.laid.value):
            continue
        factor = source.factor * factor if node.op_type == "Mul" else source.factor / factor
        return dataclasses.replace(source, laid=Laid(other, source.laid.axes), factor=factor)
    return None


def readings(result: Laid, facts: Facts) -> tuple[Laid, ...]:
    """The result and the views of it that alone look at it."""
    found = [result]
    while len(found) < _FURTHEST:
        last = found[-1]
        followers = viewers(last.value)
        if last.value.is_graph_output() or len(followers) != 1:
            break
        view = downward(followers[0], last.axes, facts)
        if view is None:
            break
        found.append(view)
    return tuple(found)
