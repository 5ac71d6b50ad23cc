"""Caches as a shared buffer lies, (batch, heads, positions, channels), where a model's inputs and outputs have them otherwise.

    past (b, t, n, h) ── Concat ── present (b, t, n, h)        as      past (b, n, t, h) ── Concat ── present (b, n, t, h)

Keys and values may also be parts of one input, `(2, b, n, t, h)`, and of one output. A shared buffer has another
interface in any case, so each of them becomes an input and an output of its own. A mask `(b, 1, 1, t)` becomes `(b, t)`.

buffer (b, t, n, h) ── Scatter ── buffer (b, t, n, h)      as      buffer (b, n, t, h) ── Transpose ── Scatter ── Transpose
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Factor, leaves, length, replaced
from onnx_attnfuse.attention.axes.rearrange import arrange, is_view
from onnx_attnfuse.attention.axes.views import IndexedValue, views_above, views_below
from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.attention.match.operands import appending
from onnx_attnfuse.attention.match.steps import Readers
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.shared_cache.decoder import POSITIONS
from onnx_attnfuse.fusion.shared_cache.static import is_static, writer
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import is_standard, needed
from onnx_attnfuse.graph.edit import answer_shapes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import GATHERS, REARRANGES, SLICES
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import is_copy, is_fed
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.layout import cache_layout, shared_heads

_OF_MASK = (0, -1)
"""The axes of a mask that are those of its entries and positions."""


@dataclasses.dataclass(frozen=True)
class _Cached:
    """The keys, or the values, of one attention."""

    given: ir.Value
    """The input of the model that the earlier ones are, or are a part of."""
    new: IndexedValue
    present: IndexedValue
    earlier: Axes
    """The layout of the earlier ones in a buffer."""
    appended: Axes
    whole: Axes
    is_laid_out: bool
    """Whether they are in that layout, and an input and an output by themselves."""


def laid_out(model: ir.Model, readers: Readers) -> ir.Model | None:
    """A model with caches that lie as a buffer does.

    Args:
        model: The model, which is not changed.
        readers: Readers of nodes inside attentions.

    Returns:
        None where they lie so already, or where one is computed, or looked at by anything but its attention.
    """
    alone = model.clone()
    scope = next(iter(scopes(alone)))
    graph, facts = scope.graph, scope.facts
    found = find_candidates(scope, readers, keep_outputs=True)
    specs = [item.spec for item in found if item.spec is not None and item.spec.cache is not None]
    filled = [item.spec for item in found if item.spec is not None and is_static(item.spec, facts)]
    caches = [cached for spec in specs for cached in _caches(spec, facts)]
    held = [buffer for spec in filled for buffer in buffers(spec, facts)]
    batch = next((length(spec.axes.b) for spec in (*specs, *filled)), None)
    masks = [value for value in graph.inputs if batch is not None and _is_thin(value, batch, facts)]
    if len(caches) < 2 * len(specs) or len(held) < 2 * len(filled):
        return None
    if all(item.is_laid_out for item in (*caches, *held)) and not masks:
        return None
    presents = {cached.present.value for cached in caches}
    given_out = {output: parts for output in graph.outputs if (parts := _parts(output, presents))}
    if sorted(map(id, (part for parts in given_out.values() for part in parts))) != sorted(map(id, presents)):
        return None
    builder = Builder(graph, facts, scope.opset, all_names(alone))
    try:
        for mask in masks:
            _flatten(graph, builder, mask)
        turn(graph, builder, [buffer for buffer in held if not buffer.is_laid_out])
        return alone if _lay_out(graph, builder, caches, given_out) else None
    except Refused:
        return None


def _caches(spec: AttentionSpec, facts: Facts) -> Iterator[_Cached]:
    """The keys and the values of an attention, if both are parts of inputs that others are appended to."""
    cache, axes, heads = spec.cache, spec.axes, shared_heads(spec)
    assert cache is not None
    for past, present, channels in zip(cache.past, cache.present, (axes.h, axes.v), strict=True):
        appends, (*_, given) = appending(present.value, facts), views_above(past, facts, selecting=True)
        if appends is None or not is_fed(given.value):
            return
        if _running(given.axes) != _running(past.axes):  # repeated, so that a buffer holds more than is given
            return
        place = next(at for at, axis in enumerate(past.axes) if axis == cache.past_axis)
        earlier, appended, whole = (
            cache_layout(spec, heads, columns, channels) for columns in (cache.past_axis, cache.new_axis, axes.j)
        )
        yield _Cached(
            given.value,
            IndexedValue(needed(appends, 1), replaced(present.axes, place, cache.new_axis)),
            present,
            earlier,
            appended,
            whole,
            given.value is past.value and is_view(past, earlier) and present.value.is_graph_output(),
        )


def _running(axes: Axes) -> set[Factor]:
    """The factors that axes run over, not those of which a part is chosen."""
    return {leaf for axis in axes for leaf in leaves(axis) if leaf.position is None}


def _is_thin(value: ir.Value, batch: Dim, facts: Facts) -> bool:
    """Whether an input has a truth value or whole number for each entry and position, and axes of length 1 between."""
    dims, dtype = facts.dims(value), facts.dtype(value)
    if dims is None or dtype is None or dtype.is_floating_point() or value.const_value is not None:
        return False
    return len(dims) > len(_OF_MASK) and dims[0] == batch and set(dims[1:-1]) == {1} and dims[-1] != 1


def _flatten(graph: ir.Graph, builder: Builder, mask: ir.Value) -> None:
    """Gives a mask the axes of entries and positions alone."""
    facts, dims = builder.facts, dims_of(builder, mask)
    flat = new_input(builder, mask, [dims[axis] for axis in _OF_MASK])
    builder.at(next(iter(graph)))
    thin = builder.reshape(flat, dims)
    mask.replace_all_uses_with(thin)
    facts.copy(mask, thin)
    exchange(graph, {mask: [flat]}, {})


def _parts(value: ir.Value, presents: set[ir.Value]) -> list[ir.Value]:
    """The keys and values that an output consists of, in their order; none if there is anything else in it."""
    if value in presents:
        return [value]
    node = value.producer()
    if node is None or not is_standard(node, "Concat", *REARRANGES):
        return []
    read = [item for item in (node.inputs if node.op_type == "Concat" else node.inputs[:1]) if item is not None]
    found = [_parts(item, presents) for item in read]
    return [part for parts in found for part in parts] if all(found) else []


def _lay_out(graph: ir.Graph, builder: Builder, caches: Sequence[_Cached], given_out: dict[ir.Value, list[ir.Value]]) -> bool:
    """Gives each cache an input, a Concat and an output in its layout; whether nothing else needs those that were."""
    facts, inputs, outputs = builder.facts, dict[ir.Value, list[ir.Value]](), dict[ir.Value, ir.Value]()
    for cached in caches:
        past = new_input(builder, cached.given, [length(axis) for axis in cached.earlier])
        inputs.setdefault(cached.given, []).append(past)
        old, appends = cached.present.value, appending(cached.present.value, facts)
        assert appends is not None
        builder.at(appends)
        new = arrange(builder, cached.new, cached.appended)
        whole = [length(axis) for axis in cached.whole]
        present = builder.node("Concat", [past, new], {"axis": POSITIONS}, dims=whole, dtype=facts.dtype(old))
        outputs[old] = present
        seen = arrange(builder, IndexedValue(present, cached.whole), cached.present.axes)
        for node, place in tuple(old.uses()):
            if node is not present.producer():
                node.replace_input_with(place, seen)
    exchange(graph, inputs, {value: [outputs[part] for part in parts] for value, parts in given_out.items()})
    sweep([*given_out, *outputs])
    for given in inputs:
        answer(given, builder)
    graph.sort()
    return not any(given.uses() for given in inputs)


def exchange(
    graph: ir.Graph, inputs: Mapping[ir.Value, Sequence[ir.Value]], outputs: Mapping[ir.Value, Sequence[ir.Value]]
) -> None:
    """Gives a model other inputs and outputs in the places of some; the only one for an input takes over its name."""
    for values, exchanged in ((graph.inputs, inputs), (graph.outputs, outputs)):
        values[:] = [new for value in values for new in exchanged.get(value, [value])]
    for given, (first, *more) in inputs.items():
        first.name = first.name if more else given.name


def answer(given: ir.Value, builder: Builder) -> None:
    """Gives whoever asks for the shape of a cache, or of a view of it, the same numbers from elsewhere."""
    for node, _ in tuple(given.uses()):
        if is_copy(node) or is_standard(node, *REARRANGES, *SLICES, *GATHERS):
            for output in node.outputs:
                answer(output, builder)
            sweep(node.outputs)
    answer_shapes(given, builder)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The buffer of the keys, or of the values, of one attention."""

    given: IndexedValue
    """The input of the model."""
    result: IndexedValue
    """The output of the model."""
    layout: Axes
    """The batch, the heads, the positions and the channels, of which both have an axis each."""

    @property
    def is_laid_out(self) -> bool:
        """Whether both lie as a shared buffer does."""
        return all(list(map(leaves, item.axes)) == list(map(leaves, self.layout)) for item in (self.given, self.result))


def buffers(spec: AttentionSpec, facts: Facts) -> Iterator[Buffer]:
    """The buffers of the keys and of the values of an attention, if both are inputs and outputs of the model."""
    axes, heads = spec.axes, shared_heads(spec)
    for operand, channels in ((spec.key, axes.h), (spec.value, axes.v)):
        indexed = operand[-1].indexed
        node = writer(indexed.value)
        if node is None or node.inputs[0] is None:
            return
        *_, given = views_above(IndexedValue(node.inputs[0], indexed.axes), facts)
        results = [item for item in views_below(indexed, facts) if item.value.is_graph_output()]
        layout = cache_layout(spec, heads, axes.j, channels)
        wanted = Counter(map(leaves, layout))
        if not results or any(Counter(map(leaves, item.axes)) != wanted for item in (given, results[0])):
            return
        if not is_fed(given.value):
            return
        yield Buffer(given, results[0], layout)


def turn(graph: ir.Graph, builder: Builder, turned: Sequence[Buffer]) -> None:
    """Gives each of some buffers an input and an output whose axes have the order of a shared buffer, in place."""
    for buffer in turned:
        given, result = buffer.given.value, buffer.result.value
        builder.at(next(iter(graph)))
        new = new_input(builder, given, [length(axis) for axis in buffer.layout])
        given.replace_all_uses_with(arrange(builder, IndexedValue(new, buffer.layout), buffer.given.axes))
        exchange(graph, {given: [new]}, {result: [arrange(builder, buffer.result, buffer.layout)]})


def new_input(builder: Builder, given: ir.Value, dims: Sequence[Dim]) -> ir.Value:
    """An input with the contents of another, of which sizes are asked from now on; whoever asks for it puts it into the graph."""
    facts = builder.facts
    noted = dict(zip(facts.dims(given) or (), given.shape or (), strict=False))
    shape = ir.Shape([dim if isinstance(dim, int) else noted.get(dim, str(dim)) for dim in dims])
    new = ir.Value(name=builder.name(f"{given.name}_laid_out"), shape=shape, type=given.type)
    facts.record(new, dims, facts.dtype(given))
    for axis, dim in enumerate(dims):
        if isinstance(dim, Size) and len(dim.atoms) == 1 and facts.origins.get(dim.atoms[0].key, (None, 0))[0] is given:
            facts.origins[dim.atoms[0].key] = (new, axis)
    return new
