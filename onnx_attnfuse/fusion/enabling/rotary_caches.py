"""Caches of RotaryEmbedding widened to the batch, where ONNX Runtime refuses a form that exporters write and the standard allows.

Exporters leave the batch of the caches at 1, as in torch; the kernels want a cache for every entry.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.rewriting import GraphContext

_CACHES = (1, 2)


def widen_caches(graph: GraphContext) -> list[ir.Node]:
    """Repeats the caches of RotaryEmbedding for every entry of the batch; returns the nodes."""
    facts = graph.scope.facts
    found = [node for node in graph.scope.graph if _has_narrow_caches(node, facts)]
    for node in found:
        operand = facts.dims(_input(node, 0))
        assert operand is not None
        graph.builder.at(node)
        for place in _CACHES:
            cache = _input(node, place)
            dims = facts.dims(cache)
            assert dims is not None
            wide = graph.builder.expand(cache, [operand[0], *dims[1:]], [index == 0 for index in range(len(dims))])
            node.replace_input_with(place, wide)
    return found


def _has_narrow_caches(node: ir.Node, facts: Facts) -> bool:
    """Whether the node reads caches of batch 1 in place, for operands of another batch."""
    if not is_standard(node, "RotaryEmbedding") or len(node.inputs) > len(_CACHES) + 1:
        return False
    operand, *caches = (facts.dims(_input(node, place)) for place in range(3))
    if not operand or operand[0] == 1:
        return False
    return all(cache is not None and len(cache) == 3 and cache[0] == 1 for cache in caches)


def _input(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value
