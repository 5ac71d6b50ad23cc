"""The length of a shared cache as one number in the place of a mask, as onnxruntime-genai tells it to the decoder of Whisper.

A model that has no mask of its own gets one that tells lengths, and is judged with it. All ones, it says no more than a number.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scopes import all_names
from onnx_attnfuse.serving.decoder import ServedDecoder

PAST_LENGTH = "past_sequence_length"
"""The name of the input, (1) int32, that onnxruntime-genai has for it by default."""


def told_by_number(model: ir.Model, decoder: ServedDecoder) -> ServedDecoder:
    """Gives a decoder the number of earlier positions in the place of its mask, and drops inputs that nobody reads; in place.

    Args:
        model: The decoder, with an input (b, past + s) that tells lengths only.
        decoder: Its interface.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    mask, facts = inputs[decoder.attention_mask], Facts(graph)
    builder = Builder(graph, facts, model.opset_imports[""], all_names(model))
    builder.at(next(iter(graph)))
    name = builder.name(PAST_LENGTH)
    past = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT32))
    facts.record(past, [1], ir.DataType.INT32)
    dims = facts.dims(inputs[decoder.input_ids or decoder.inputs_embeds])
    assert dims is not None
    batch, new, *_ = dims
    total = builder.elementwise("Add", [builder.cast(past, ir.DataType.INT64), builder.shape([new])], ir.DataType.INT64)
    whole = builder.node("Concat", [builder.shape([batch]), total], {"axis": 0}, dims=[2], dtype=ir.DataType.INT64)
    one = builder.constant(np.asarray(1, np.int64))
    ones = builder.node("Expand", [one, whole], dims=facts.dims(mask), dtype=ir.DataType.INT64)
    mask.replace_all_uses_with(ones)
    unread = {name for name in decoder.others if not inputs[name].uses()}
    kept = [past if value is mask else value for value in graph.inputs if value.name not in unread]
    graph.inputs[:] = kept
    graph.sort()
    return dataclasses.replace(
        decoder, attention_mask="", past_length=name, others=tuple(item for item in decoder.others if item not in unread)
    )
