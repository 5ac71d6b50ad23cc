"""The inputs and outputs of a decoder: those of the source, and their names and shapes afterwards; states among them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import count_of, length
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.shared_cache.decoder import LENGTH, POSITIONS, TOTAL, window_length
from onnx_attnfuse.fusion.shared_cache.lengths import Lengths
from onnx_attnfuse.fusion.shared_cache.positions import Counting, context_length, counts_alike, is_by_place
from onnx_attnfuse.fusion.shared_cache.sites import Attended, CachedSite
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard, reads
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dim
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, RESHAPES
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import is_fed
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.serving.decoder import ServedDecoder, template
from onnx_attnfuse.targets.layout import shared_heads
from onnx_attnfuse.verify.input_kinds import kinds

_State = tuple[str, str]
"""The names of an input with the state before the new tokens, and of the output with it after them."""
_CONVOLUTION, _RECURRENCE = 3, 4
"""The ranks of states (b, channels, positions) and (b, heads, keys, values)."""


def _states(graph: ir.Graph, cache: Collection[ir.Value], facts: Facts) -> tuple[tuple[_State, ...], tuple[_State, ...]]:
    """The states of convolutions, and of recurrences: the output of one is that of its shape which the fewest others reach.

    Args:
        graph: The decoder.
        cache: Inputs and outputs with keys and values.
        facts: Its facts.

    Returns:
        No states where the output of one is in doubt; else both in the order of the layers.
    """
    states = [item for item in graph.inputs if item not in cache and item.const_value is None and _is_state(item, facts)]
    reached = _reached(graph, states)
    outputs = [item for item in graph.outputs if item not in cache]
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for state in states:
        alike = [item for item in outputs if state in reached[item] and _kind(item, facts) == _kind(state, facts)]
        alike.sort(key=lambda item: len(reached[item]))
        if not alike or (len(alike) > 1 and len(reached[alike[0]]) == len(reached[alike[1]])):
            return (), ()
        pairs.append((state, alike[0]))
    if len({after for _, after in pairs}) < len(pairs):
        return (), ()
    pairs.sort(key=lambda pair: len(reached[pair[1]]))
    names = [(facts.rank(before), (before.name or "", after.name or "")) for before, after in pairs]
    convolutions, recurrences = (tuple(pair for own, pair in names if own == rank) for rank in (_CONVOLUTION, _RECURRENCE))
    return convolutions, recurrences


def _is_state(value: ir.Value, facts: Facts) -> bool:
    """Whether an input has the shape of a state: one for each entry, of a size that does not change."""
    dims = facts.dims(value) or ()
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return is_float and len(dims) in (_CONVOLUTION, _RECURRENCE) and all(isinstance(dim, int) for dim in dims[1:])


def _kind(value: ir.Value, facts: Facts) -> object:
    return facts.dims(value), facts.dtype(value)


def _reached(graph: ir.Graph, states: Collection[ir.Value]) -> dict[ir.Value | None, set[ir.Value]]:
    """The states that each value is computed from."""
    found = collections.defaultdict[ir.Value | None, set[ir.Value]](set, {state: {state} for state in states})
    for node in graph:
        given = () if is_standard(node, *ASKS_SHAPE) else reads(node)
        sources = set[ir.Value]().union(*(found[value] for value in given if value in found))
        found.update(dict.fromkeys(node.outputs, sources))
    return found


def read_interface(
    graph: ir.Graph, facts: Facts, sites: Sequence[CachedSite], crossed: Sequence[tuple[ir.Value, ir.Value]]
) -> ServedDecoder:
    """Reads the interface of a decoder; its cache has the names of the source.

    Args:
        graph: The decoder.
        facts: Its facts.
        sites: The attentions with a cache.
        crossed: Keys and values that an encoder made, of the others.

    Raises:
        Refused: It has no input of tokens, or no output that could be logits.
    """
    axes = sites[0].spec.axes
    whole = length(axes.b), length(axes.i)
    found = kinds(graph, facts)
    new = [value for value in graph.inputs if value.const_value is None and _is_of_new(value, whole, facts)]
    named = {found[value.name or ""].name: value for value in reversed(new) if facts.rank(value) == 2}
    embedded = [value for value in new if facts.rank(value) == 3 and value.dtype is not None and value.dtype.is_floating_point()]
    tokens, positions = named.get("ids"), named.get("positions")
    if tokens is None and not embedded:
        raise Refused("no-decoder", "the model has no input (batch, new positions) of tokens, or of their embeddings")
    pasts = {value for site in sites for value in site.past}
    presents = {value for site in sites for value in site.present}
    rest = [value for value in graph.outputs if value not in presents and facts.dtype(value) in FLOATS]
    outputs = [value for value in rest if facts.rank(value) == 3] or [value for value in rest if facts.rank(value) == 2]
    if not outputs:
        raise Refused(
            "no-decoder", "the model has no output (batch, positions, channels), or (batch, channels), other than its cache"
        )
    table = None if tokens is None else next(map(facts.dims, _tables(tokens)), None)
    embedding = table if tokens is not None else facts.dims(embedded[0])
    hidden = embedding[-1] if embedding else None
    logits = _logits(outputs, table[0] if table else None, hidden, facts)
    width = (facts.dims(logits) or (None,))[-1]
    counting = Counting(
        tokens,
        frozenset() if positions is None else frozenset([positions]),
        frozenset(site.mask for site in sites if site.mask is not None),
        frozenset(site.filled.position for site in sites if site.filled is not None),
    )
    by_place = any(is_by_place(bias, counting) for site in sites for bias in site.meaning.biases)
    own = [site for site in sites if site.leader is None]
    windows, spec = {site.window for site in sites}, own[0].spec
    fresh = length(spec.axes.i)
    past_keys, past_values = _names(site.past for site in own)
    present_keys, present_values = _names(site.present for site in own)
    cross_keys, cross_values = _names(crossed)
    convolutions, recurrences = _states(graph, {*presents, *pasts}, facts)
    return ServedDecoder(
        layers=len(own),
        num_heads=spec.axes.num_heads,
        kv_heads=count_of(shared_heads(spec)),
        head_size=count_of(spec.axes.h),
        hidden_size=hidden if isinstance(hidden, int) else None,
        vocab_size=width if isinstance(width, int) else None,
        context_length=context_length(graph, counting, facts),
        input_ids="" if tokens is None else tokens.name or "",
        inputs_embeds=None if tokens is not None else embedded[0].name,
        attention_mask="",
        position_ids=None if positions is None else positions.name,
        past_keys=past_keys,
        past_values=past_values,
        logits=logits.name or "",
        present_keys=present_keys,
        present_values=present_values,
        logits_by_entry=facts.rank(logits) == 2,
        window=windows.pop() if len(windows) == 1 else None,
        new_tokens=fresh if isinstance(fresh, int) else None,
        counts_alike=by_place or counts_alike(graph, counting, facts),
        cache_windows=tuple(site.window if site.evicts else None for site in own),
        convolutions=convolutions,
        recurrences=recurrences,
        cross_keys=cross_keys,
        cross_values=cross_values,
    )


def _names(parts: Iterable[tuple[ir.Value, ir.Value]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of keys, and those of values, layer by layer."""
    pairs = list(parts)
    return tuple(key.name or "" for key, _ in pairs), tuple(value.name or "" for _, value in pairs)


def _is_of_new(value: ir.Value, whole: tuple[Dim, Dim], facts: Facts) -> bool:
    """Whether an input has the axes (entries, new positions), or sizes of its own that may be 1 instead, as positions do."""
    dims = (facts.dims(value) or ())[:2]
    return len(dims) == len(whole) and all(
        dim == size or dim in facts.shorter(size) for dim, size in zip(dims, whole, strict=True)
    )


def _logits(outputs: Sequence[ir.Value], words: Dim | None, hidden: Dim | None, facts: Facts) -> ir.Value:
    """The first output of as many channels as there are words; else the first that is no hidden state, or the first."""
    widths = [(value, (facts.dims(value) or (None,))[-1]) for value in outputs]
    of_words = [value for value, width in widths if width is not None and width == words]
    others = [value for value, width in widths if width != hidden]
    return [*of_words, *others, *outputs][0]


def _tables(tokens: ir.Value) -> Iterator[ir.Value]:
    """The tables that tokens choose rows of."""
    for node, place in tokens.uses():
        if is_standard(node, "Gather") and place == 1 and node.inputs[0] is not None:
            yield node.inputs[0]
        elif is_standard(node, *RESHAPES, *CASTS, "Identity") and place == 0:
            yield from _tables(node.outputs[0])


def encoded(specs: Sequence[AttentionSpec], facts: Facts) -> list[tuple[ir.Value, ir.Value]]:
    """Keys and values that an encoder made for each of the attentions that have no cache: inputs (b, n, positions, h)."""
    found: list[tuple[ir.Value, ir.Value]] = []
    for spec in specs:
        key, value = spec.key[-1].indexed, spec.value[-1].indexed
        wanted = [*map(length, (spec.axes.b, spec.axes.n, spec.axes.j, spec.axes.h))]
        if (
            is_fed(key.value)
            and is_fed(value.value)
            and all(list(facts.dims(item.value) or ()) == wanted for item in (key, value))
        ):
            found.append((key.value, value.value))
    return found


def drop_idle(graph: ir.Graph) -> list[str]:
    """Drops each input that only becomes an output, and that output: a state that no step reads or changes; their names."""
    names: list[str] = []
    for value in [item for item in graph.inputs if item.const_value is None and item.uses()]:
        readers = [node for node, _ in value.uses()]
        copies = [node.outputs[0] for node in readers if is_standard(node, "Identity")]
        if len(copies) < len(readers) or any(copy.uses() or not copy.is_graph_output() for copy in copies):
            continue
        kept = [output for output in graph.outputs if output not in copies and output is not value]
        graph.outputs[:] = kept
        sweep(copies)
        graph.inputs.remove(value)
        names.append(value.name or "")
    return names


def added_mask(graph: ir.Graph, builder: Builder, site: CachedSite) -> ir.Value:
    """A new input (batch, total) int64 that tells lengths, of a model that has no mask."""
    batch = length(site.spec.axes.b)
    dims = [batch if isinstance(batch, int) else str(batch), TOTAL]
    name = builder.name("attention_mask")
    value = ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.INT64))
    first_past = next(place for place, item in enumerate(graph.inputs) if item in site.past)
    graph.inputs.insert(first_past, value)
    total = builder.facts.fresh(value, 1)
    builder.facts.record(value, [batch, total], ir.DataType.INT64)
    return value


def finish_interface(
    graph: ir.Graph, builder: Builder, attended: Sequence[Attended], decoder: ServedDecoder, lengths: Lengths
) -> ServedDecoder:
    """Names the parts of the buffer by layer, beside states with the source's numbers, and gives them its length.

    Pages have a shape by then.

    Args:
        graph: The decoder.
        builder: Its builder.
        attended: Its attentions.
        decoder: Its interface, with the source's names of the cache.
        lengths: The lengths of a batch.

    Returns:
        The interface as it is then.
    """
    attended = [item for item in attended if item.site.leader is None]
    has_states = decoder.convolutions or decoder.recurrences
    numbers = template(decoder.past_keys)[1] if has_states else ()
    parts = [
        (value, f"{where}.{layer}.{what}")
        for layer, item in zip(numbers or range(len(attended)), attended, strict=True)
        for where, pair in (("past_key_values", item.site.past), ("present", item.present))
        for what, value in zip(("key", "value"), pair, strict=True)
    ]
    builder.names.difference_update(value.name or "" for value, _ in parts)
    for value, name in parts:
        value.name = builder.name(name)
    for item in () if decoder.pages is not None else attended:
        for past, present in zip(item.site.past, item.present, strict=True):
            length = window_length(item.site.window) if item.site.evicts and item.site.window else LENGTH
            dims = [length if axis == POSITIONS else dim for axis, dim in enumerate(past.shape or ())]
            past.shape, present.shape = ir.Shape(dims), ir.Shape(dims)
            present.type = past.type
    past_keys, past_values = _names(item.site.past for item in attended)
    present_keys, present_values = _names(item.present for item in attended)
    known = {decoder.input_ids, decoder.inputs_embeds, decoder.attention_mask, decoder.position_ids}
    known |= {*past_keys, *past_values, *decoder.cross_keys, *decoder.cross_values}
    known |= {before for before, _ in (*decoder.convolutions, *decoder.recurrences)}
    known |= set[str | None]() if decoder.pages is None else {*dataclasses.astuple(decoder.pages)}
    mask = next((value for value in graph.inputs if value.name == decoder.attention_mask), None)
    return dataclasses.replace(
        decoder,
        past_keys=past_keys,
        past_values=past_values,
        present_keys=present_keys,
        present_values=present_values,
        mask_ends_anywhere=mask is not None and lengths.ends_anywhere(mask),
        takes_chunks=lengths.buffered.counts is not None,
        others=tuple(value.name or "" for value in graph.inputs if value.const_value is None and value.name not in known),
    )
