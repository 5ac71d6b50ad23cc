"""Buffers of a fixed length whose axes have another order: their inputs and outputs are turned, so that they lie as is wanted.

buffer (b, t, n, h) ── Scatter ── buffer (b, t, n, h)      as      buffer (b, n, t, h) ── Transpose ── Scatter ── Transpose
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.shared_cache.inputs import new_input
from onnx_attnfuse.fusion.shared_cache.static import behind, outputs_of
from onnx_attnfuse.fusion.shared_cache.writes import writer
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.targets.cache import cache_layout
from onnx_attnfuse.targets.layout import shared_heads


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The buffer of the keys, or of the values, of one attention."""

    given: ir.Value
    """The input of the model."""
    result: ir.Value
    """The output of the model."""
    given_order: tuple[int, ...]
    """The axes of the input that are the batch, the heads, the positions and the channels."""
    result_order: tuple[int, ...]

    @property
    def is_laid_out(self) -> bool:
        """Whether both lie as a shared buffer does."""
        return self.given_order == self.result_order == tuple(range(len(self.given_order)))


def buffers(spec: AttentionSpec) -> Iterator[Buffer]:
    """The buffers of the keys and of the values of an attention, if both are inputs and outputs of the model."""
    axes, heads = spec.axes, shared_heads(spec)
    for operand, channels in ((spec.key, axes.h), (spec.value, axes.v)):
        indexed = operand[-1].indexed
        node = writer(indexed.value)
        if node is None or node.inputs[0] is None:
            return
        given, results = behind(IndexedValue(node.inputs[0], indexed.axes)), outputs_of(indexed.value, indexed.axes)
        wanted = cache_layout(spec, heads, axes.j, channels)
        orders = [_order(item.axes, wanted) for item in (given, *results[:1])]
        if len(orders) < 2 or orders[0] is None or orders[1] is None:
            return
        if not given.value.is_graph_input() or given.value.const_value is not None:
            return
        yield Buffer(given.value, results[0].value, orders[0], orders[1])


def _order(axes: Axes, wanted: Axes) -> tuple[int, ...] | None:
    """The places of the wanted axes; None where one is not there by itself."""
    left = [leaves(axis) for axis in axes]
    order: list[int] = []
    for axis in wanted:
        place = next((at for at, found in enumerate(left) if found == leaves(axis) and at not in order), None)
        if place is None:
            return None
        order.append(place)
    return tuple(order) if len(order) == len(axes) else None


def turn(graph: ir.Graph, builder: Builder, turned: Sequence[Buffer]) -> None:
    """Gives each of some buffers an input and an output whose axes have the order of a shared buffer, in place."""
    for buffer in turned:
        given, result, facts = buffer.given, buffer.result, builder.facts
        dims = facts.dims(given)
        assert dims is not None
        builder.at(next(iter(graph)))
        new = new_input(builder, given, [dims[place] for place in buffer.given_order])
        back = [buffer.given_order.index(place) for place in range(len(dims))]
        given.replace_all_uses_with(builder.transpose(new, back))
        graph.inputs[list(graph.inputs).index(given)] = new
        new.name, given.name = given.name, None
        graph.outputs[list(graph.outputs).index(result)] = builder.transpose(result, buffer.result_order)
