"""genai_config.json as onnxruntime-genai reads it: what the model says, what a config adds, what nobody says, what is refused.

That onnxruntime-genai runs it is tested by `benchmarks/genai_tokens.py`; `make test-genai`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.serving import genai_config, hugging_face
from onnx_attnfuse.serving.decoder import ServedDecoder, StepSizes
from onnx_attnfuse.verify.decoder_feeds import Pages


def names(kind: str, count: int = 2) -> tuple[str, ...]:
    return tuple(kind % layer for layer in range(count))


DECODER = ServedDecoder(
    layers=2,
    num_heads=4,
    kv_heads=2,
    head_size=8,
    hidden_size=32,
    vocab_size=99,
    context_length=64,
    input_ids="ids",
    inputs_embeds=None,
    attention_mask="mask",
    position_ids="places",
    past_keys=names("past_key_values.%d.key"),
    past_values=names("past_key_values.%d.value"),
    logits="scores",
    present_keys=names("present.%d.key"),
    present_values=names("present.%d.value"),
    window=None,
)
IDS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}


def content(decoder: ServedDecoder = DECODER, config: dict[str, Any] | None = None, ep: str = "cpu") -> dict[str, Any]:
    return genai_config.genai_config(decoder, filename="model.onnx", ep=ep, config=IDS if config is None else config)


def changed(**fields: Any) -> ServedDecoder:
    return dataclasses.replace(DECODER, **fields)


def test_everything_the_model_says_is_there() -> None:
    assert content() == {
        "model": {
            "type": "decoder",
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
            "pad_token_id": 0,
            "vocab_size": 99,
            "context_length": 64,
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"log_id": "onnx-attnfuse", "provider_options": []},
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_size": 8,
                "hidden_size": 32,
                "inputs": {
                    "input_ids": "ids",
                    "attention_mask": "mask",
                    "position_ids": "places",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "scores",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "max_length": 64, "num_beams": 1, "past_present_share_buffer": True},
    }
    assert genai_config.assumed(DECODER, IDS) == ()


def test_a_model_that_counts_positions_itself_is_given_none() -> None:
    assert "position_ids" not in content(changed(position_ids=None))["model"]["decoder"]["inputs"]


def test_a_window_is_not_told_as_the_runtime_would_keep_no_more_than_a_window_of_the_cache() -> None:
    assert content(changed(window=4)) == content()


def test_another_execution_provider_is_named_with_its_options() -> None:
    made = genai_config.genai_config(
        DECODER, filename="model.onnx", ep="cuda", config=IDS, provider_options={"enable_cuda_graph": "1"}
    )
    assert made["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]


STEPS = StepSizes(batch=1, new=1, total=48, max_length=48)


def captured(decoder: ServedDecoder, config: dict[str, Any] = IDS) -> dict[str, Any]:
    return genai_config.genai_config(decoder, filename="model.onnx", ep="cuda", config=config)


def test_captured_steps_have_the_buffer_they_were_made_for_and_prompts_token_by_token() -> None:
    made = captured(changed(sizes=STEPS, mask_ends_anywhere=True))
    assert made["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]
    assert (made["search"]["max_length"], made["search"]["chunk_size"], made["model"]["context_length"]) == (48, 1, 64)
    assert "chunk_size" not in captured(DECODER)["search"]


def test_the_context_of_captured_steps_is_their_buffer_where_nobody_tells_another() -> None:
    decoder = changed(sizes=STEPS, mask_ends_anywhere=True, context_length=None)
    assert captured(decoder)["model"]["context_length"] == 48
    assert genai_config.assumed(decoder, IDS) == ()


def test_caches_of_no_more_than_a_window_have_one_length_in_the_layers_that_have_one() -> None:
    decoder = changed(cache_windows=(8, None))
    made = genai_config.genai_config(decoder, filename="model.onnx", ep="cpu", config=IDS)["model"]["decoder"]
    kept = {"window_size": 8, "cache_slack": 64, "layers": [0], "slide_key_value_cache": False, "slide_inputs": False}
    assert made["sliding_window"] == kept
    assert any("max_length must be 8 or more" in line for line in genai_config.assumed(decoder, IDS))
    wider = changed(cache_windows=(8, 16))
    made = genai_config.genai_config(wider, filename="model.onnx", ep="cpu", config=IDS)["model"]["decoder"]
    assert (made["sliding_window"]["window_size"], made["sliding_window"]["layers"]) == (16, [0, 1])
    assert (
        "sliding_window"
        not in genai_config.genai_config(DECODER, filename="model.onnx", ep="cpu", config=IDS)["model"]["decoder"]
    )


CROSSED = {"cross_keys": names("cross_key_%d"), "cross_values": names("cross_value_%d")}


def test_a_decoder_with_keys_of_an_encoder_is_whisper_s_and_has_an_encoder_beside_it() -> None:
    decoder = changed(**CROSSED, past_length="past", attention_mask="", position_ids=None)
    model = content(decoder)["model"]
    assert model["type"] == "whisper"
    assert model["encoder"] == {
        "filename": genai_config.ENCODER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_size": 8,
        "hidden_size": 32,
        "inputs": {"audio_features": "audio_features"},
        "outputs": {
            "encoder_hidden_states": "encoder_hidden_states",
            "cross_present_key_names": "present_key_cross_%d",
            "cross_present_value_names": "present_value_cross_%d",
        },
    }
    assert model["decoder"]["inputs"] == {
        "input_ids": "ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
        "past_sequence_length": "past",
        "cross_past_key_names": "cross_key_%d",
        "cross_past_value_names": "cross_value_%d",
    }
    (line,) = genai_config.assumed(decoder, IDS)
    assert line.startswith("the encoder is not written; put it there as encoder.onnx")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (CROSSED, "runs Whisper's alone, without a mask; name Whisper's config.json with --hf-config"),
        ({"past_length": "past"}, "keys and values of an encoder for each of 2 layers"),
        ({**CROSSED, "past_length": "past", "cross_keys": ("cross_key_0",)}, "for each of 2 layers"),
        ({**CROSSED, "past_length": "past", "cross_keys": ("first", "second")}, "differ in the number of the layer alone"),
        ({**CROSSED, "past_length": "past", "others": ("encoder_mask",)}, "nothing to pass as 'encoder_mask'"),
    ],
    ids=["told by a mask", "without an encoder", "keys of one layer", "other names", "a mask of the encoder's"],
)
def test_decoders_with_an_encoder_that_onnxruntime_genai_cannot_run_get_no_config(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        content(changed(**fields))


def pairs(kind: str, *layers: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"past.{layer}.{kind}", f"present.{layer}.{kind}") for layer in layers)


def test_states_are_named_beside_the_cache_and_count_as_layers() -> None:
    """onnxruntime-genai ran this kind of decoder token by token, with the tokens that PyTorch gives."""
    hybrid = changed(convolutions=pairs("conv", 0, 2, 3), recurrences=pairs("memory", 0, 2, 3), new_tokens=1)
    made = content(hybrid)
    inner = made["model"]["decoder"]
    assert (made["model"]["type"], inner["num_hidden_layers"], made["search"]["chunk_size"]) == ("decoder", 4, 1)
    assert inner["inputs"]["past_conv_names"] == "past.%d.conv"
    assert inner["inputs"]["past_recurrent_names"] == "past.%d.memory"
    assert inner["outputs"]["present_recurrent_names"] == "present.%d.memory"
    assert "layer_types" not in inner
    (line,) = genai_config.assumed(hybrid, IDS)
    assert line.startswith("onnxruntime-genai runs one prompt at a time, and no batch, ")
    assert genai_config.assumed(dataclasses.replace(hybrid, new_tokens=None), IDS) == (
        "prompts of a batch must have one length in onnxruntime-genai, as states take padding in",
    )


def test_states_of_convolutions_alone_want_the_kinds_of_layers() -> None:
    """onnxruntime-genai 0.18 ran LFM2 by this; its own type `lfm2` reads no prompt token by token."""
    cached = {"past_keys": names("past.%d.key")[1:], "past_values": names("past.%d.value")[1:]}
    cached |= {"present_keys": names("present.%d.key")[1:], "present_values": names("present.%d.value")[1:]}
    made = content(changed(**cached, convolutions=pairs("conv", 0, 2)))
    assert made["model"]["type"] == "decoder"
    assert made["model"]["decoder"]["layer_types"] == ["conv", "full_attention", "conv"]
    assert "chunk_size" not in made["search"]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"convolutions": (("first", "next_first"), ("second", "next_second"))}, "unlike 'first', ...; export the model"),
        ({"convolutions": (("past.0.conv", "present.1.conv"),)}, "unlike 'past.0.conv', ...; export the model"),
        ({"recurrences": pairs("memory", 0)}, "and that of a convolution in the same layer"),
        ({"recurrences": pairs("memory", 0), "convolutions": pairs("conv", 2)}, "and that of a convolution in the same layer"),
        ({"convolutions": pairs("conv", 1, 2)}, "in layers without keys and values alone"),
    ],
    ids=["other names", "other layers", "no convolution", "elsewhere", "with keys"],
)
def test_states_that_onnxruntime_genai_does_not_hand_in_get_no_config(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        content(changed(**fields))


PAGED = changed(pages=Pages("starts", "pasts", "table"), attention_mask="", position_ids=None)


@pytest.mark.parametrize(("ep", "pages"), [("cpu", {"num_blocks": 16}), ("cuda", {})])
def test_a_cache_in_pages_is_for_the_engine(ep: str, pages: dict[str, int]) -> None:
    made = content(PAGED, ep=ep)
    assert made["engine"] == {"dynamic_batching": {"block_size": 256, "max_batch_size": 16, **pages}}
    assert made["search"] == {"do_sample": False, "max_length": 64, "num_beams": 1}
    assert made["model"]["decoder"]["inputs"] == {
        "input_ids": "ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
        "cumulative_sequence_lengths": "starts",
        "past_sequence_lengths": "pasts",
        "block_table": "table",
    }
    assert "engine" not in content()


def test_a_decoder_that_counts_positions_for_all_entries_alike_takes_prompts_of_one_length() -> None:
    (line,) = genai_config.assumed(changed(counts_alike=True), IDS)
    assert line.endswith("counts positions for all entries alike")
    (line,) = genai_config.assumed(changed(counts_alike=True, position_ids=None), IDS)
    assert line.endswith("counts positions for all entries alike; export it with position_ids as an input")


def test_a_table_shorter_than_the_config_says_is_named() -> None:
    (line,) = genai_config.assumed(DECODER, {**IDS, "context_length": 256})
    assert line == "context_length is 64, as the model's table of positions has 64 rows; the Hugging Face config says 256"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"sizes": dataclasses.replace(STEPS, batch=2)}, "prompts of one sequence .* not 1 for 2"),
        ({"sizes": dataclasses.replace(STEPS, new=4)}, "prompts of one sequence .* not 4 for 1"),
        ({"sizes": dataclasses.replace(STEPS, total=40)}, "as long as the buffer .* not 40 for 48"),
        ({"mask_ends_anywhere": False}, "zeros after the text .* --padding assume-right"),
        ({"context_length": 32}, "48 positions and the model 32"),
        ({"others": ("encoder_hidden_states",)}, "nothing to pass as 'encoder_hidden_states'"),
    ],
    ids=lambda item: "" if isinstance(item, str) else next(iter(item)),
)
def test_steps_that_onnxruntime_genai_cannot_run_get_no_config(fields: dict[str, Any], what: str) -> None:
    decoder = changed(**{"sizes": STEPS, "mask_ends_anywhere": True, **fields})
    with pytest.raises(OptionError, match=what):
        captured(decoder)


def test_what_nobody_knows_is_harmless_and_told() -> None:
    decoder = changed(context_length=None)
    model = content(decoder, {})["model"]
    assert (model["eos_token_id"], model["pad_token_id"], model["context_length"]) == ([98], 98, genai_config.CONTEXT_LENGTH)
    assert "bos_token_id" not in model
    eos, length = genai_config.assumed(decoder, {})
    assert "eos_token_id" in eos
    assert "--hf-config" in eos
    assert "context_length" in length


def test_the_context_is_the_shorter_of_the_model_s_tables_and_the_config_s_number() -> None:
    assert content(config={**IDS, "context_length": 32})["model"]["context_length"] == 32
    assert content(config={**IDS, "context_length": 128})["search"]["max_length"] == 64


def test_padding_that_is_no_token_is_the_token_that_ends() -> None:
    assert content(config={**IDS, "pad_token_id": -1})["model"]["pad_token_id"] == 2
    assert content(config={**IDS, "pad_token_id": 99})["model"]["pad_token_id"] == 2


def test_layers_may_be_numbered_anywhere_in_a_name() -> None:
    decoder = changed(
        past_keys=("h0_k8", "h1_k8"), past_values=("h0_v8", "h1_v8"), present_keys=("0k", "1k"), present_values=("0v", "1v")
    )
    made = content(decoder)["model"]["decoder"]
    assert made["inputs"]["past_key_names"] == "h%d_k8"
    assert made["outputs"]["present_value_names"] == "%dv"


@pytest.mark.parametrize(
    "keys",
    [("first", "second"), ("a0", "b1"), ("k.00", "k.01"), ("k.1", "k.2"), ("k.0.0", "k.1.1")],
    ids=["no number", "another word", "leading zeros", "other numbers than the values", "two numbers"],
)
def test_names_without_a_common_form_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="differ in the number of the layer alone"):
        content(changed(past_keys=keys))


@pytest.mark.parametrize(
    ("decoder", "config", "message"),
    [
        (changed(input_ids="", inputs_embeds="embeds"), IDS, "takes embeddings"),
        (changed(vocab_size=None), IDS, "how many tokens there are; name its config.json"),
        (DECODER, {**IDS, "vocab_size": 100}, "vocabulary of 100 and the model one of 99"),
        (DECODER, {"eos_token_id": 99}, "eos_token_id of the Hugging Face config is 99 and the model has 99 tokens"),
        (DECODER, {"eos_token_id": "</s>"}, "eos_token_id of the Hugging Face config is '</s>', not a number"),
        (DECODER, {"eos_token_id": [1, True]}, "is True, not a number"),
        (DECODER, {**IDS, "context_length": 0}, "context_length of the Hugging Face config is 0, not a number from 1"),
    ],
)
def test_what_contradicts_is_refused(decoder: ServedDecoder, config: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        content(decoder, config)


def test_only_what_cannot_be_run_at_all_is_unfit() -> None:
    assert genai_config.unfit(DECODER) is None
    assert genai_config.unfit(DECODER, {"vocab_size": 100}) is None
    assert "takes embeddings" in (genai_config.unfit(changed(input_ids="", inputs_embeds="embeds")) or "")
    assert "no.1" in (genai_config.unfit(changed(present_keys=("no.1", "no.one"))) or "")
    assert genai_config.unfit(changed(vocab_size=None), {"vocab_size": 9}) is None


def test_a_plan_names_the_model_the_provider_and_what_nobody_tells(tmp_path: pathlib.Path) -> None:
    session = Session("CUDAExecutionProvider", {"sdpa_kernel": "1"})
    planned = genai_config.plan(DECODER, session, tmp_path / "fused.onnx", {})
    decoder = planned.content["model"]["decoder"]
    assert decoder["filename"] == "fused.onnx"
    assert decoder["session_options"]["provider_options"] == [{"cuda": {"sdpa_kernel": "1"}}]
    assert planned.assumed == genai_config.assumed(DECODER)
    assert not list(tmp_path.iterdir())
    planned.write()
    assert [path.name for path in tmp_path.iterdir()] == [genai_config.FILE]


def test_a_folder_with_the_config_of_somebody_else_is_refused_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / genai_config.FILE).write_text("{}")
    with pytest.raises(OptionError, match="was not written by attnfuse"):
        genai_config.plan(DECODER, Session("CPUExecutionProvider"), tmp_path / "model.onnx")


def test_a_vocabulary_may_come_from_the_config() -> None:
    assert content(changed(vocab_size=None), {**IDS, "vocab_size": 50})["model"]["vocab_size"] == 50


def test_a_config_is_written_and_written_over(tmp_path: pathlib.Path) -> None:
    genai_config.write(content(), tmp_path)
    path = genai_config.write(content(config={}), tmp_path)
    assert json.loads(path.read_text()) == content(config={})
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["{}", "no JSON", '{"model": {"decoder": {"session_options": {"log_id": "onnxruntime-genai"}}}}']
)
def test_a_config_of_somebody_else_stays(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / genai_config.FILE
    path.write_text(text)
    with pytest.raises(OptionError, match="was not written by attnfuse"):
        genai_config.write(content(), tmp_path)
    assert path.read_text() == text


def written(folder: pathlib.Path, entries: dict[str, Any], name: str = "config.json") -> pathlib.Path:
    path = folder / name
    path.write_text(json.dumps(entries))
    return path


def test_a_config_is_read_by_the_names_that_models_have(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, {"model_type": "gpt2", "n_ctx": 7, "n_positions": 1024, "eos_token_id": 5, "pad_token_id": None})
    assert hugging_face.read_config(path) == {"context_length": 1024, "eos_token_id": 5}


def test_a_text_model_inside_of_another_counts_where_the_outer_one_is_silent(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, {"text_config": {"vocab_size": 9, "eos_token_id": 1}, "eos_token_id": 2})
    assert hugging_face.read_config(path) == {"vocab_size": 9, "eos_token_id": 2}


def test_the_generation_config_beside_it_has_the_last_word_on_tokens(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, {"eos_token_id": 1, "pad_token_id": 4, "max_position_embeddings": 64})
    beside = written(tmp_path, {"eos_token_id": [1, 2], "max_position_embeddings": 1}, hugging_face.GENERATION)
    assert hugging_face.read_config(path) == {"eos_token_id": [1, 2], "pad_token_id": 4, "context_length": 64}
    assert hugging_face.read_config(beside)["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*; check the path"),
        ("{", "is no JSON: .*; name the config.json"),
        ("[1]", "is no JSON object; name the config.json"),
        ('{"hidden_act": "silu"}', "has none of bos_token_id, eos_token_id, pad_token_id or max_position_embeddings; name"),
    ],
    ids=["missing", "broken", "a list", "of something else"],
)
def test_what_is_no_config_is_refused_in_one_line(tmp_path: pathlib.Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        hugging_face.read_config(path)
    assert "\n" not in str(caught.value)
