"""What is read of the inputs and outputs of a decoder, for whoever calls it."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.serving.genai_config import unfit
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import buffered, grown, steps

_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
_EXPORTS = pathlib.Path(__file__).parent / "exports"


def _shared(model: onnx.ModelProto) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, ep="cpu", cache="shared")


def test_what_a_caller_needs_to_know() -> None:
    result = _shared(onnx.load(_LLAMA))
    found = result.report.decoder
    assert found is not None
    assert (found.layers, found.num_heads, found.kv_heads, found.head_size, found.window) == (2, 4, 2, 8, None)
    assert (found.hidden_size, found.vocab_size, found.context_length, found.inputs_embeds) == (32, 99, None, None)
    assert (found.input_ids, found.attention_mask, found.position_ids) == ("input_ids", "attention_mask", "position_ids")
    assert (found.past_keys, found.logits) == (("past_key_values.0.key", "past_key_values.1.key"), "logits")
    assert found.present_values == ("present.0.value", "present.1.value")
    graph = result.model.graph
    assert [item.name for item in graph.input] == [
        "input_ids", "attention_mask", "position_ids", "past_key_values.0.key", "past_key_values.0.value",
        "past_key_values.1.key", "past_key_values.1.value",
    ]  # fmt: skip
    shapes = {item.name: [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim] for item in graph.input}
    assert shapes["past_key_values.0.key"] == ["batch", 2, "max_sequence_length", 8]
    onnx.checker.check_model(result.model)


def test_what_positions_and_embeddings_tell_of_a_decoder() -> None:
    found = _shared(onnx.load(_EXPORTS / "gpt2_past__ts17__eager.onnx")).report.decoder
    assert found is not None
    assert (found.position_ids, found.context_length, found.hidden_size) == (None, 64, 32)
    windowed = _shared(onnx.load(_EXPORTS / "mistral_past__dyn18__sdpa.onnx")).report.decoder
    assert windowed is not None
    assert windowed.window == 4


def test_logits_are_the_output_of_as_many_channels_as_there_are_words() -> None:
    """The hidden states are the first output, as models that are to be trained on give them."""
    model = onnx.load(_LLAMA)
    hidden = next(node.input[0] for node in model.graph.node if "logits" in node.output)
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info(hidden, onnx.TensorProto.FLOAT, ["batch", "seq", 32]))
    found = _shared(model).report.decoder
    assert found is not None
    assert (found.logits, found.vocab_size) == ("logits", 99)


def test_positions_of_one_row_for_all_entries_are_another_input() -> None:
    model = onnx.load(_LLAMA)
    positions = next(item for item in model.graph.input if item.name == "position_ids")
    positions.type.tensor_type.shape.dim[0].dim_value = 1
    result = _shared(model)
    found = result.report.decoder
    assert found is not None
    assert (found.position_ids, found.others) == (None, ("position_ids",))
    assert [site.verified is not None for site in result.report.sites] == [True, True]


@pytest.mark.parametrize("padding", [[[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6]], ids=["none", "left"])
def test_one_row_of_logits_for_each_entry(padding: list[list[int]]) -> None:
    model = onnx.load(_LLAMA)
    graph = model.graph
    next(node for node in graph.node if "logits" in node.output).output[0] = "every"
    graph.initializer.append(onnx.helper.make_tensor("last", onnx.TensorProto.INT64, [], [-1]))
    graph.node.append(onnx.helper.make_node("Gather", ["every", "last"], ["logits"], axis=1))
    logits = next(item for item in graph.output if item.name == "logits")
    logits.CopyFrom(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 99]))
    result = _shared(model)
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert (found.logits, found.vocab_size, found.logits_by_entry) == ("logits", 99, True)
    assert "has no positions" in (unfit(found) or "")
    fed = steps(padding, (1, 1))
    for old, new in zip(grown(model, found, fed), buffered(result.model, found, fed), strict=True):
        np.testing.assert_allclose(new, old, atol=2e-4, rtol=1e-3)


def test_tokens_that_were_chosen_are_no_logits() -> None:
    model = onnx.load(_LLAMA)
    graph = model.graph
    next(node for node in graph.node if "logits" in node.output).output[0] = "every"
    graph.node.append(onnx.helper.make_node("ArgMax", ["every"], ["logits"], axis=2, keepdims=0))
    logits = next(item for item in graph.output if item.name == "logits")
    logits.CopyFrom(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.INT64, ["batch", "seq"]))
    result = _shared(model)
    assert result.report.decoder is None
    assert any("no output (batch, positions, channels)" in note for note in result.report.notes)
