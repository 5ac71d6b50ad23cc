"""A cache in pages: the tokens of all requests one after the other, and attentions that find their keys by tables of blocks.

    attended, decoder = pack(graph, builder, attended, decoder, mask)

The decoder is one for a single entry by then, (1, s), whose axis of positions becomes that of the tokens of all requests. That is
exact where each node but the attentions computes every token by itself, from the token and its position. So everything above the
outputs is read step by step (`token_by_token.py`), and numbers that count positions are those of each token in its request.
What asks for the length of the past, or for that of the new positions as a number, has no meaning any more and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.bodies import paged_attention
from onnx_attnfuse.bodies.core import INTEGER
from onnx_attnfuse.fusion.shared_cache.sites import Attended
from onnx_attnfuse.fusion.shared_cache.token_by_token import Paging, Step
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.edit import answer_shapes, connect
from onnx_attnfuse.graph.fixed_sizes import with_numbers
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CONTRIB
from onnx_attnfuse.graph.sizes import Dim, Size, lone_atom, symbols
from onnx_attnfuse.graph.sweep import sweep_unused
from onnx_attnfuse.graph.uses import label, live, producer_of
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify.decoder_feeds import Pages

NAME = "PagedAttention"
_SMALL = ir.DataType.INT32
_KEPT = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size")


def one_entry(model: ir.Model) -> ir.Model:
    """A copy of a decoder whose batch, the first axis of its inputs, is one entry."""
    alone = model.clone()
    fed = [
        value for value in alone.graph.inputs if value.const_value is None and value.shape is not None and len(value.shape) > 1
    ]
    entries = {
        dim.value for dim in (value.shape[0] for value in fed if value.shape is not None) if isinstance(dim, ir.SymbolicDim)
    }
    numbers = {name: 1 for name in entries if name is not None}
    for value in (*alone.graph.inputs, *(output for node in alone.graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = with_numbers(value.shape, numbers)
    return alone


def added_step(graph: ir.Graph, builder: Builder, tokens: ir.Value, new: Size) -> Step:
    """Adds the inputs of a step, and gives the decoder tokens in one axis.

    Args:
        graph: The decoder, of one entry.
        builder: The builder.
        tokens: The input (1, s) of tokens, or (1, s, channels) of their embeddings, which is removed.
        new: The symbol for s.
    """
    facts, batch = builder.facts, "batch_size"
    shapes = {
        "cumulative_sequence_lengths": [f"{batch} + 1"],
        "past_sequence_lengths": [batch],
        "block_table": [batch, "max_blocks"],
    }
    kind = ir.TensorType(_SMALL)
    values = [ir.Value(name=builder.name(name), shape=ir.Shape(dims), type=kind) for name, dims in shapes.items()]
    cumulative, past, table = values
    count = facts.fresh(past, 0)
    facts.record(past, [count], _SMALL)
    facts.record(cumulative, [count + 1], _SMALL)
    facts.record(table, [count, facts.fresh(table, 1)], _SMALL)
    rest = dims_of(builder, tokens)[2:]
    flat = ir.Value(name=tokens.name, shape=ir.Shape(["num_tokens", *map(_shown, rest)]), type=tokens.type)
    facts.record(flat, [new, *rest], facts.dtype(tokens))
    facts.origins[new.atoms[0].key] = (flat, 0)
    graph.inputs[list(graph.inputs).index(tokens)] = flat
    graph.inputs.extend(values)
    tokens.name = builder.name(f"{flat.name}_of_one_entry")
    builder.at(next(iter(graph)))
    packed = paged_attention.packed(builder, cumulative, past, new)
    row = builder.reshape(flat, [1, new, *rest])
    tokens.replace_all_uses_with(row)
    return Step(Pages(*(value.name or "" for value in values)), cumulative, past, table, flat, row, packed.position)


def _shown(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def pack(
    graph: ir.Graph, builder: Builder, attended: Sequence[Attended], decoder: ServedDecoder, mask: ir.Value
) -> tuple[list[Attended], ServedDecoder]:
    """Makes a decoder of one entry one for the tokens of many requests, in place; gives what changed.

    Args:
        graph: The decoder, whose attentions read a buffer.
        builder: The builder.
        attended: Its attentions.
        decoder: Its interface.
        mask: The input that gave lengths, which is removed.

    Raises:
        Refused: Something mixes tokens, or cannot be known for each request.
    """
    site = attended[0].site
    new, facts = length(site.spec.axes.i), builder.facts
    if not isinstance(new, Size) or lone_atom(new) is None:
        raise Refused(
            "not-position-wise", f"each step has {new} tokens, and requests have any number; name that axis in the export"
        )
    if length(site.spec.axes.b) != 1:
        raise Refused("not-position-wise", f"the batch has {length(site.spec.axes.b)} entries; name that axis in the export")
    inputs = {value.name: value for value in graph.inputs}
    positions = inputs.get(decoder.position_ids or "")
    step = added_step(graph, builder, inputs[decoder.input_ids or decoder.inputs_embeds], new)
    _without_padding(builder, mask, site.past_length + new)
    presents = {value for item in attended for value in item.present}
    outputs = [value for value in graph.outputs if value not in presents]
    Paging(builder, new, site.past_length, step, positions).prove([item.node for item in attended], outputs)
    for value in [node.inputs[0] for node in graph if is_standard(node, *ASKS_SHAPE)]:
        dims = facts.dims(value)
        if value is not None and value.producer() and dims is not None and set().union(*map(symbols, dims)) <= symbols(new):
            answer_shapes(value, builder)
    builder.at(next(iter(graph)))
    for value in outputs:
        flattened(builder, value, new)
    pages = [page(builder, item, step, new) for item in attended]
    sweep_unused([node for node in graph if node not in live(graph)])
    for given in (mask, *(() if positions is None else (positions,))):
        take_away(graph, given)
    graph.sort()
    return pages, dataclasses.replace(decoder, attention_mask="", position_ids=None, counts_alike=False, pages=step.pages)


def _without_padding(builder: Builder, mask: ir.Value, total: Dim) -> None:
    """Makes the mask ones, one for each position, as a request has no padding; what follows from that is read again."""
    facts, readers = builder.facts, list(mask.uses())
    old, dims, dtype = dims_of(builder, mask), [1, total], facts.dtype(mask)
    facts.record(mask, dims, dtype)
    one = ir.tensor(np.ones(1, np.bool_ if dtype is None else dtype.numpy()))
    shape = builder.node("Shape", [mask], dims=[len(dims)], dtype=INTEGER)
    ones = builder.node("ConstantOfShape", [shape], {"value": one}, dims=dims, dtype=dtype)
    for node, place in readers:
        node.replace_input_with(place, ones)
    builder.graph.sort()
    own = symbols(old[1]) - symbols(total)
    for node in builder.graph:
        found = facts.dims(node.outputs[0]) or ()
        if any(symbols(dim) & own for dim in found) or (len(found) < 2 and facts.content(node.outputs[0]) is None):
            facts.learn(node)


def page(builder: Builder, item: Attended, step: Step, new: Size) -> Attended:
    """Puts PagedAttention in the place of an operator that reads a buffer, whose past and present become pages."""
    node, facts = item.node, builder.facts
    builder.at(node)
    operands = [None if value is None else builder.reshape(value, [new, dims_of(builder, value)[2]]) for value in node.inputs[:3]]
    given = {name: attribute(node, name) for name in _KEPT if name in node.attributes}
    inputs = [*operands, *item.site.past, step.cumulative, step.past, step.table]
    if (sink := INFO.input(node, "head_sink")) is not None:
        inputs += [None, None, None, sink]
    result = node.outputs[0]
    width, dtype = dims_of(builder, result)[2], facts.dtype(result)
    first = builder.node(NAME, inputs, given, domain=CONTRIB, dims=[new, width], dtype=dtype, hint=node.name, outputs=3)
    made = producer_of(first)
    made.metadata_props.update(item.site.node.metadata_props)
    for past, old, present in zip(item.site.past, item.present, made.outputs[1:], strict=True):
        _, heads, _, size = dims_of(builder, past)
        past.shape = present.shape = ir.Shape(["num_blocks", "block_size", _shown(heads), _shown(size)])
        present.type = past.type
        facts.record(past, [facts.fresh(past, 0), facts.fresh(past, 1), heads, size], None)
        facts.record(present, dims_of(builder, past), facts.dtype(past))
        old.replace_all_uses_with(present, replace_graph_outputs=True)
    result.replace_all_uses_with(builder.reshape(first, dims_of(builder, result)))
    builder.graph.remove(node, safe=True)
    window = given.get("local_window_size", -1)
    form = ", ".join([f"{NAME} causal", *([] if window == -1 else [f"local_window_size {window}"]), "pages"])
    emitted = dataclasses.replace(item.emitted, node=made, mask=form)
    return dataclasses.replace(item, emitted=emitted, present=(made.outputs[1], made.outputs[2]))


def flattened(builder: Builder, output: ir.Value, new: Size) -> None:
    """Gives out a value (1, s, ...) with tokens in its first axis, by the same name."""
    dims = dims_of(builder, output)
    shown = ["num_tokens", *map(_shown, dims[2:])]
    flat = builder.reshape(output, [new, *dims[2:]])
    connect(output, flat, builder, [])
    flat.shape = ir.Shape(shown)


def take_away(graph: ir.Graph, given: ir.Value) -> None:
    """Removes an input that nothing needs any more.

    Raises:
        Refused: Something does.
    """
    if (reader := next((node for node, _ in given.uses()), None)) is not None:
        message = f"'{given.name}' or the length of the past is read for something else than positions and masks"
        raise Refused("not-position-wise", message, label(reader))
    if given in graph.inputs:
        graph.inputs.remove(given)
