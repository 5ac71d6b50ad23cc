"""Keys and values that are appended to those of earlier positions: `present = concat(past, new)` along the keys."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves, length, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, is_short
from onnx_attnfuse.attention.match import operands
from onnx_attnfuse.attention.spec import Cache, Source
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import is_read_once


def read_cache(
    key: tuple[Source, ...], value: tuple[Source, ...], query_axis: Axis, key_axis: Axis, channels: Axis, facts: Facts
) -> Cache | None:
    """How keys and values are put together if both are, of as many new positions, and then of as many earlier ones of that type.

    Args:
        key: The keys and the values that they are views of.
        value: The values and those that they are views of.
        query_axis: The positions of the queries; if they are as many as all keys, two streams are joined, as of text and image.
        key_axis: The positions of keys and values.
        channels: The channels of a head of the keys, which may be rotated before they are put to the earlier ones.
        facts: Shapes and types.
    """
    if length(query_axis) == length(key_axis):
        return None
    keys, values = (_appended(operand[-1], key_axis, facts) for operand in (key, value))
    if keys is None or values is None or any(is_short(operand[-1].indexed, facts) for operand in (key, value)):
        return None
    past_key, new_key, axis = keys
    past_value, new_value, value_axis = values
    pairs = ((key[0], past_key), (value[0], past_value))
    if any(facts.dtype(read.indexed.value) != facts.dtype(past.value) for read, past in pairs):
        return None
    earlier, new, same = (_length(*part, facts) for part in ((past_key, axis), (new_key, axis), (new_value, value_axis)))
    if earlier is None or new is None or new != same or sizes.least(new) < 1:
        return None  # operators that append fail where there is nothing new
    past_axis, new_axis = (Factor(earlier),), () if new == 1 else (Factor(new),)
    return Cache(
        past=(_along(past_key, axis, past_axis), _along(past_value, value_axis, past_axis)),
        new=(
            new_sources(_along(new_key, axis, new_axis), key[-1].factor, channels, facts),
            new_sources(_along(new_value, value_axis, new_axis), value[-1].factor, (), facts),
        ),
        present=(key[-1].indexed, value[-1].indexed),
        past_axis=past_axis,
        new_axis=new_axis,
    )


def appending(present: ir.Value, facts: Facts) -> ir.Node | None:
    """The node that keys or values with the new ones are from, but for casts to their own type of what nothing else reads.

    TorchScript writes such casts, where a module converts its keys to the type of its hidden states.
    """
    node = present.producer()
    while is_standard(node, "Cast") and (value := node.inputs[0]) is not None:
        dtype = facts.dtype(value)
        if dtype is None or dtype != facts.dtype(node.outputs[0]) or not is_read_once(value):
            return node
        node = value.producer()
    return node


def _appended(source: Source, key_axis: Axis, facts: Facts) -> tuple[IndexedValue, IndexedValue, int] | None:
    """The two parts of a Concat along the keys, laid out as it is, and its axis; none that is rotated as a whole."""
    node, axes = appending(source.indexed.value, facts), source.indexed.axes
    if not is_standard(node, "Concat") or len(node.inputs) != 2:
        return None
    if source.rotary is not None:
        return None
    past, new = node.inputs
    axis: int = attribute(node, "axis", 0) % len(axes)
    if past is None or new is None or leaves(axes[axis]) != leaves(key_axis):
        return None
    if facts.dtype(past) != facts.dtype(new):
        return None
    return IndexedValue(past, axes), IndexedValue(new, axes), axis


def new_sources(indexed: IndexedValue, factor: float, channels: Axis, facts: Facts) -> tuple[Source, ...]:
    """New keys or values and the views after them; the factor comes after the concatenation, so the cache is not scaled."""
    found = operands.sources(indexed, facts, channels, plain=True)
    return tuple(dataclasses.replace(source, factor=factor) for source in found)


def _length(indexed: IndexedValue, axis: int, facts: Facts) -> Dim | None:
    dims = facts.dims(indexed.value)
    return None if dims is None or len(dims) != len(indexed.axes) else dims[axis]


def _along(indexed: IndexedValue, place: int, axis: Axis) -> IndexedValue:
    """An indexed value whose axis at `place` runs over other positions."""
    return IndexedValue(indexed.value, replaced(indexed.axes, place, axis))
