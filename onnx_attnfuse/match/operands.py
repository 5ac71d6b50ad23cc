"""What an operand is a view of, and what the result is viewed as: the places where a fused operator may be connected."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.axes.views import Laid, downward, upward
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.spec import Source

_FURTHEST = 16
"""Views are followed this far; longer chains do not occur and would only cost time."""


def sources(operand: Laid, facts: Facts, *, plain: bool = False) -> tuple[Source, ...]:
    """The operand and everything it is a view of, nearest first.

    Args:
        operand: The operand.
        facts: Shapes of the graph.
        plain: Stop where it is multiplied; else factors that are plain numbers are gathered on the way.
    """
    found = [Source(operand)]
    while len(found) < _FURTHEST:
        last = found[-1]
        view = upward(last.laid, facts, selecting=True)
        if view is not None:
            found.append(Source(view, last.factor))
            continue
        widened = _widened(last.laid, facts)
        if widened is not None:
            found.append(Source(widened, last.factor))
            continue
        scaled = None if plain else _scaled(last, facts)
        if scaled is None:
            break
        found.append(scaled)
    return tuple(found)


def _widened(laid: Laid, facts: Facts) -> Laid | None:
    """What float32 numbers were before, which lost nothing on the way."""
    node = laid.value.producer()
    if node is None or node.op_type != "Cast" or node.domain not in {"", "ai.onnx"} or node.inputs[0] is None:
        return None
    before = facts.dtype(node.inputs[0])
    if facts.dtype(laid.value) != ir.DataType.FLOAT or before not in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        return None
    return Laid(node.inputs[0], laid.axes)


def _scaled(source: Source, facts: Facts) -> Source | None:
    node = source.laid.value.producer()
    if node is None or node.op_type not in {"Mul", "Div"} or node.domain not in {"", "ai.onnx"}:
        return None
    for index in (0, 1) if node.op_type == "Mul" else (1,):
        number, other = node.inputs[index], node.inputs[1 - index]
        factor = facts.number(number) if number is not None else None
        if other is None or not factor or facts.rank(other) != len(source.laid.axes):
            continue
        if facts.dtype(other) != facts.dtype(source.laid.value):
            continue
        return Source(Laid(other, source.laid.axes), source.factor * factor if node.op_type == "Mul" else source.factor / factor)
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
