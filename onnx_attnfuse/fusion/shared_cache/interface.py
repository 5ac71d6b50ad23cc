"""The inputs and outputs of a decoder: what they are before anything is done, and their names and shapes afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.shared_cache.attend import Attended
from onnx_attnfuse.fusion.shared_cache.lengths import Lengths
from onnx_attnfuse.fusion.shared_cache.qualify import CachedSite
from onnx_attnfuse.fusion.shared_cache.states import State, States, read_states
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import constant_tensor, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dim
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, RESHAPES
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.serving.decoder import ServedDecoder, template
from onnx_attnfuse.targets.layout import shared_heads
from onnx_attnfuse.verify.input_kinds import kinds

LENGTH, TOTAL = "max_sequence_length", "total_sequence_length"
"""The names of the buffer's length, and of that of an added mask."""
POSITIONS = 2
"""The axis of positions in a cache, (b, heads, positions, channels)."""


@dataclasses.dataclass(frozen=True)
class Interface:
    """The roles of the inputs and outputs of a decoder; values go by themselves, as names may change."""

    tokens: ir.Value | None
    embeddings: ir.Value | None
    positions: ir.Value | None
    logits: ir.Value
    logits_by_entry: bool
    hidden_size: int | None
    vocab_size: int | None
    context_length: int | None
    counts_alike: bool
    states: States


def read_interface(graph: ir.Graph, facts: Facts, sites: Sequence[CachedSite]) -> Interface:
    """Reads the roles of the inputs and outputs of a decoder.

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
            "no-decoder", "the model has no output (batch, positions, channels), or (batch, channels), besides its cache"
        )
    table = None if tokens is None else next(map(facts.dims, _tables(tokens)), None)
    embedding = table if tokens is not None else facts.dims(embedded[0])
    hidden = embedding[-1] if embedding else None
    logits = _logits(outputs, table[0] if table else None, hidden, facts)
    width = (facts.dims(logits) or (None,))[-1]
    by_entry = (positions, *(site.mask for site in sites))
    shared = frozenset(site.filled.position for site in sites if site.filled is not None)
    counting = Counting(tokens, frozenset(value for value in by_entry if value is not None), shared)
    return Interface(
        tokens,
        None if tokens is not None else embedded[0],
        positions,
        logits,
        facts.rank(logits) == 2,
        hidden if isinstance(hidden, int) else None,
        width if isinstance(width, int) else None,
        context_length(graph, counting, facts),
        counts_alike(graph, counting, facts),
        read_states(graph, {*presents, *pasts}, facts),
    )


def _is_of_new(value: ir.Value, whole: tuple[Dim, Dim], facts: Facts) -> bool:
    """Whether an input has the axes (entries, new positions), or sizes of its own that may be 1 instead, as positions do."""
    dims = (facts.dims(value) or ())[:2]
    return len(dims) == len(whole) and all(
        dim == size or facts.is_shorter(dim, size) for dim, size in zip(dims, whole, strict=True)
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
        given = all(item.value.is_graph_input() and item.value.const_value is None for item in (key, value))
        if given and all(list(facts.dims(item.value) or ()) == wanted for item in (key, value)):
            found.append((key.value, value.value))
    return found


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


def settle(builder: Builder, attended: Sequence[Attended], states: States) -> None:
    """Names the parts of the buffer by layer, beside states with the source's numbers, and gives them its length."""
    attended = [item for item in attended if item.site.leader is None]
    has_states = states.convolutions or states.recurrences
    numbers = template([item.site.past[0].name or "" for item in attended])[1] if has_states else ()
    parts = [
        (value, f"{where}.{layer}.{what}")
        for layer, item in zip(numbers or range(len(attended)), attended, strict=True)
        for where, pair in (("past_key_values", item.site.past), ("present", item.present))
        for what, value in zip(("key", "value"), pair, strict=True)
    ]
    builder.names.difference_update(value.name or "" for value, _ in parts)
    for value, name in parts:
        value.name = builder.name(name)
    for item in attended:
        for past, present in zip(item.site.past, item.present, strict=True):
            dims = [LENGTH if axis == POSITIONS else dim for axis, dim in enumerate(past.shape or ())]
            past.shape, present.shape = ir.Shape(dims), ir.Shape(dims)
            present.type = past.type


def served(
    graph: ir.Graph,
    interface: Interface,
    mask: ir.Value,
    attended: Sequence[Attended],
    lengths: Lengths,
    crossed: Sequence[tuple[ir.Value, ir.Value]],
) -> ServedDecoder:
    """The interface of the decoder, for whoever calls it."""
    spec = attended[0].site.spec
    windows = {item.site.window for item in attended}
    attended = [item for item in attended if item.site.leader is None]
    pasts = [value for item in attended for value in item.site.past]
    known = {
        interface.tokens,
        interface.embeddings,
        interface.positions,
        mask,
        *pasts,
        *(value for value, _ in (*interface.states.convolutions, *interface.states.recurrences)),
        *(value for pair in crossed for value in pair),
    }
    heads, size, new = length(shared_heads(spec)), length(spec.axes.h), length(spec.axes.i)
    assert isinstance(heads, int)
    assert isinstance(size, int)
    return ServedDecoder(
        layers=len(attended),
        num_heads=spec.axes.num_heads,
        kv_heads=heads,
        head_size=size,
        hidden_size=interface.hidden_size,
        vocab_size=interface.vocab_size,
        context_length=interface.context_length,
        input_ids=_name(interface.tokens) or "",
        inputs_embeds=_name(interface.embeddings),
        attention_mask=mask.name or "",
        position_ids=_name(interface.positions),
        past_keys=tuple(item.site.past[0].name or "" for item in attended),
        past_values=tuple(item.site.past[1].name or "" for item in attended),
        logits=interface.logits.name or "",
        logits_by_entry=interface.logits_by_entry,
        present_keys=tuple(item.present[0].name or "" for item in attended),
        present_values=tuple(item.present[1].name or "" for item in attended),
        window=windows.pop() if len(windows) == 1 else None,
        mask_ends_anywhere=lengths.ends_anywhere(mask),
        new_tokens=new if isinstance(new, int) else None,
        counts_alike=interface.counts_alike,
        convolutions=_names(interface.states.convolutions),
        recurrences=_names(interface.states.recurrences),
        cross_keys=tuple(key.name or "" for key, _ in crossed),
        cross_values=tuple(value.name or "" for _, value in crossed),
        others=tuple(value.name or "" for value in graph.inputs if value.const_value is None and value not in known),
    )


def _names(states: Sequence[State]) -> tuple[tuple[str, str], ...]:
    return tuple((before.name or "", after.name or "") for before, after in states)


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name


_TABLE_RANK = 2


@dataclasses.dataclass(frozen=True)
class Counting:
    """The inputs of a decoder that positions may be made of."""

    tokens: ir.Value | None
    by_entry: frozenset[ir.Value]
    """Those with numbers for each entry: position ids, and the mask."""
    shared: frozenset[ir.Value]
    """Those with numbers for all entries alike."""


def context_length(graph: ir.Graph, counting: Counting, facts: Facts) -> int | None:
    """The rows of the smallest table that is read by position; None where there is none."""
    read = [table.shape[0] for table, index in _lookups(graph) if facts.rank(index) and _counts(_made_of(index), counting, facts)]
    return min((rows for rows in read if isinstance(rows, int)), default=None)


def counts_alike(graph: ir.Graph, counting: Counting, facts: Facts) -> bool:
    """Whether a table is read, or an angle taken, at positions that all entries of a batch share."""
    if any(is_standard(node, "Slice") and _table(node.inputs[0]) and constant_tensor(node.inputs[1]) is None for node in graph):
        return True
    indices = [_made_of(index) for _, index in _lookups(graph)]
    counted = [found for found in indices if _counts(found, counting, facts)]
    angles = [_made_of(node.inputs[0]) for node in graph if is_standard(node, "Cos") and node.inputs[0] is not None]
    counted += [found for found in angles if counting.tokens not in found and _marks(found, counting)]
    return any(found.isdisjoint(counting.by_entry) for found in counted)


def _lookups(graph: ir.Graph) -> Iterator[tuple[ir.TensorProtocol, ir.Value]]:
    """The tables of floats that rows are gathered from, with the index."""
    for node in graph:
        table = _table(node.inputs[0]) if is_standard(node, "Gather") else None
        if table is not None and node.inputs[1] is not None:
            yield table, node.inputs[1]


def _table(value: ir.Value | None) -> ir.TensorProtocol | None:
    """A constant with rows of floats."""
    tensor = None if value is None else constant_tensor(value)
    return tensor if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) == _TABLE_RANK else None


def _made_of(value: ir.Value) -> set[ir.Value]:
    """A value, and all that its elements are computed from; a size depends on no element."""
    return set(sources([value], lambda _, node: not is_standard(node, *ASKS_SHAPE)))


def _counts(found: set[ir.Value], counting: Counting, facts: Facts) -> bool:
    """Whether an index with these sources is a position: it is counted, and of neither tokens nor floats."""
    of_floats = any((dtype := facts.dtype(item)) is not None and dtype.is_floating_point() for item in found)
    return counting.tokens not in found and not of_floats and _marks(found, counting)


def _marks(found: set[ir.Value], counting: Counting) -> bool:
    """Whether a position, a range or a running sum is among the sources."""
    nodes = (item.producer() for item in found)
    counted = any(node is not None and is_standard(node, "Range", "CumSum") for node in nodes)
    positions = counting.by_entry | counting.shared
    return counted or not found.isdisjoint(positions)
