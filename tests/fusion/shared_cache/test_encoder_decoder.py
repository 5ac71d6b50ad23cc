"""Decoders of encoder-decoders: the cache of their own tokens is one buffer, keys and values of the encoder's stay inputs."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.decoder_loops import Array, Fed, assert_same_at_tokens, session, steps

_FOLDER = pathlib.Path(__file__).parent / "exports" / "encoder_decoder"
_BART, _T5, _WHISPER = sorted(_FOLDER.glob("*.onnx"))
"""Exports of the recipes `*_decoder_past`, with the pasts of both attentions; Whisper's without a mask, as it needs none."""
_ENCODED, _ROOM, _OUTPUT = 9, 24, "last_hidden_state"
_FULL, _LEFT, _RIGHT = [[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6], [[1, 1, 1, 1, 0, 0], [1] * 6]


def _shared(path: pathlib.Path, **choices: object) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(onnx.load(path), **{"ep": "cpu", "cache": "shared", **choices})


def _encoded(model: onnx.ModelProto, batch: int, seed: int = 2) -> dict[str, Array]:
    """What the encoder made, as its inputs: keys and values, and a mask with padding at the end of the first entry."""
    rng = np.random.default_rng(seed)
    shapes = {item.name: [dim.dim_value for dim in item.type.tensor_type.shape.dim] for item in model.graph.input}
    mask = np.ones((batch, _ENCODED), np.int64)
    mask[0, -3:] = 0
    found: dict[str, Array] = {"encoder_attention_mask": mask}
    for name, (_, heads, _, channels) in ((name, shape) for name, shape in shapes.items() if name.startswith("cross_")):
        found[name] = rng.standard_normal((batch, heads, _ENCODED, channels)).astype(np.float32)
    found["encoder_hidden_states"] = rng.standard_normal((batch, _ENCODED, 32)).astype(np.float32)
    return {name: array for name, array in found.items() if name in shapes}


def _run(model: onnx.ModelProto, fed: Sequence[Fed], cache: dict[str, Array], seed: int = 2) -> list[Array]:
    """The outputs of each step; what a model gives besides is its next cache, in the order of `cache`."""
    started, batch = session(model), len(fed[0].tokens)
    names = {item.name for item in started.get_inputs()}
    presents = [item.name for item in started.get_outputs() if item.name != _OUTPUT]
    outputs: list[Array] = []
    for step in fed:
        past = np.array([step.mask.shape[1] - step.tokens.shape[1]], np.int32)
        feeds = {"input_ids": step.tokens, "attention_mask": step.mask, "past_sequence_length": past}
        kept = {name: array for name, array in feeds.items() if name in names}
        found, *given = started.run([_OUTPUT, *presents], kept | _encoded(model, batch, seed) | cache)
        outputs.append(found)
        cache = dict(zip(cache, given, strict=True))
    return outputs


def _grown(model: onnx.ModelProto, fed: Sequence[Fed], seed: int = 2) -> list[Array]:
    pasts = [item.name for item in model.graph.input if item.name.startswith("past_")]
    return _run(model, fed, {name: np.zeros((len(fed[0].tokens), 4, 0, 8), np.float32) for name in pasts}, seed)


def _buffered(result: onnx_attnfuse.Result, fed: Sequence[Fed], seed: int = 2) -> list[Array]:
    pasts = [item.name for item in result.model.graph.input if item.name.startswith("past_key_values.")]
    rng = np.random.default_rng(1)
    shape = (len(fed[0].tokens), 4, _ROOM, 8)
    return _run(result.model, fed, {name: rng.standard_normal(shape).astype(np.float32) for name in pasts}, seed)


@pytest.mark.parametrize(
    ("path", "padding"),
    [(_BART, _FULL), (_BART, _LEFT), (_BART, _RIGHT), (_WHISPER, _FULL), (_WHISPER, [[1] * 4])],
    ids=["BART", "BART, left", "BART, right", "Whisper", "Whisper, several on top"],
)
def test_the_decoder_s_own_cache_is_a_buffer_and_the_encoder_s_stays(path: pathlib.Path, padding: list[list[int]]) -> None:
    model, result = onnx.load(path), _shared(path)
    told = result.report.decoder
    assert told is not None
    assert sorted(site.op or "" for site in result.report.sites) == ["GroupQueryAttention"] * 2 + ["MultiHeadAttention"] * 2
    assert (told.cross_keys, told.cross_values) == (("cross_key_0", "cross_key_1"), ("cross_value_0", "cross_value_1"))
    fed = steps(padding, (3, 1, 1) if len(padding) == 1 else (1, 1, 1))
    fed = [Fed(step.tokens % 97, step.mask) for step in fed]
    assert_same_at_tokens(_grown(model, fed), _buffered(result, fed), fed)


def test_another_text_of_the_encoder_gives_something_else() -> None:
    fed = steps(_FULL)
    old, new = _grown(onnx.load(_WHISPER), fed), _buffered(_shared(_WHISPER), fed, seed=3)
    with pytest.raises(AssertionError):
        assert_same_at_tokens(old, new, fed)


def test_whisper_has_no_mask_and_is_told_lengths_by_one_that_is_added() -> None:
    result = _shared(_WHISPER)
    assert "attention_mask" not in {item.name for item in onnx.load(_WHISPER).graph.input}
    assert any("'attention_mask', an input that was added" in note for note in result.report.notes)


@pytest.mark.parametrize("padding", [_FULL, [[1] * 4]], ids=["two entries", "several on top"])
def test_a_number_in_the_place_of_the_added_mask_tells_the_same_lengths(padding: list[list[int]]) -> None:
    result = _shared(_WHISPER, past_length=True)
    found = {item.name: item.type.tensor_type for item in result.model.graph.input}
    assert {"attention_mask", "encoder_hidden_states"}.isdisjoint(found)
    assert found["past_sequence_length"].elem_type == onnx.TensorProto.INT32
    assert [dim.dim_value for dim in found["past_sequence_length"].shape.dim] == [1]
    told = result.report.decoder
    assert told is not None
    assert (told.past_length, told.attention_mask, told.others) == ("past_sequence_length", "", ())
    onnx.checker.check_model(result.model)
    fed = steps(padding, (3, 1, 1) if len(padding) == 1 else (1, 1, 1))
    assert_same_at_tokens(_grown(onnx.load(_WHISPER), fed), _buffered(result, fed), fed)


def test_a_mask_of_the_model_s_own_is_not_replaced_as_it_tells_of_padding_too() -> None:
    result = _shared(_BART, past_length=True, verify="none")
    names = {item.name for item in result.model.graph.input}
    assert "attention_mask" in names
    assert "past_sequence_length" not in names
    assert any("because the model has its own mask" in note for note in result.report.notes)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"cache": "as-is"}, "past_length needs a cache in one buffer"),
        ({"kv_cache": "int8"}, "cannot be combined with cuda_graph or kv_cache"),
        ({"ep": "cuda", "arch": "sm90", "cuda_graph": True}, "cannot be combined with cuda_graph or kv_cache"),
    ],
)
def test_a_number_is_refused_where_a_mask_is_wanted(choices: dict[str, object], message: str) -> None:
    with pytest.raises(onnx_attnfuse.OptionError, match=message):
        _shared(_WHISPER, past_length=True, **choices)


def test_biases_by_relative_position_are_handed_over_besides() -> None:
    result = _shared(_T5)
    assert result.report.decoder is not None, result.report.notes
    forms = [site.mask_form for site in result.report.sites if site.op == "GroupQueryAttention"]
    assert forms == ["GroupQueryAttention causal, shared buffer, attention_bias"] * 2
    assert all(site.verified is not None for site in result.report.sites)


def test_biases_in_half_precision_on_a_gpu_leave_the_cache_as_it_was() -> None:
    result = _shared(_T5, ep="cuda", arch="sm90")
    assert result.report.decoder is None
    assert {item.name for item in onnx.load(_T5).graph.input} == {item.name for item in result.model.graph.input}
