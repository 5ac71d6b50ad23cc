"""Encoder-decoder and audio models of transformers: T5, BART, Whisper, wav2vec2."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from models.adapters import Cached, Flat, hidden, logits
from models.recipe import Input, Recipe
from models.recipes_text import LAYERS, model, names, past_inputs, present_names

IDS = Input("input_ids", ("batch", "source"), "ids")
MASK = Input("attention_mask", ("batch", "source"), "mask")
DECODER_IDS = Input("decoder_input_ids", ("batch", "seq"), "ids")
DECODER_MASK = Input("decoder_attention_mask", ("batch", "seq"), "mask")

#: The decoder alone takes what the encoder made.
STEP_IDS = Input("input_ids", ("batch", "seq"), "ids")
STEP_MASK = Input("attention_mask", ("batch", "past+seq"), "mask")
ENCODED = Input("encoder_hidden_states", ("batch", "source", 32))
ENCODED_MASK = Input("encoder_attention_mask", ("batch", "source"), "mask")

T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
FRAMES = 24
WHISPER = {
    **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
    "num_mel_bins": 10,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
WAV2VEC2 = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (10, 4),
    "conv_kernel": (20, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
}
#: Class names of the model, the config, and the settings.
Source = tuple[str, str, dict[str, Any]]
FULL_T5: Source = ("T5ForConditionalGeneration", "T5Config", T5)
FULL_BART: Source = ("BartForConditionalGeneration", "BartConfig", BART)
FULL_WHISPER: Source = ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER)


def _whole(source: Source, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    return Flat(model(*source, attention), names(inputs), logits, use_cache=False)


def _encoder(source: Source, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    return Flat(model(*source, attention).get_encoder(), names(inputs), hidden)


def _decoder(source: Source, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    decoder = model(*source, attention).get_decoder()
    return Flat(decoder, names(inputs), hidden, use_cache=False)


def _decoder_with_past(source: Source, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    return Cached(model(*source, attention).get_decoder(), names(inputs), hidden)


def _alone(source: Source, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    return Flat(model(*source, attention), names(inputs), hidden)


def _recipe(name: str, build: Any, source: Source, inputs: tuple[Input, ...], output: str, **more: Any) -> Recipe:
    return Recipe(name, partial(build, source, inputs), inputs, (output,), **more)


def _step(name: str, source: Source, encoded: tuple[Input, ...]) -> Recipe:
    """Returns the decoder with the past of both its attentions."""
    past = (*past_inputs(4), *past_inputs(4, "cross", "source"))
    inputs = (STEP_IDS, STEP_MASK, *encoded, *past)
    outputs = ("last_hidden_state", *present_names())
    return Recipe(name, partial(_decoder_with_past, source, inputs), inputs, outputs)


FEATURES = Input("input_features", ("batch", 10, FRAMES))
DECODING = (STEP_IDS, Input("attention_mask", ("batch", "seq"), "mask"))
SEQ2SEQ = (IDS, MASK, DECODER_IDS, DECODER_MASK)
AUDIO = (Input("input_values", ("batch", "samples")),)
AUDIO_MASKED = (*AUDIO, Input("attention_mask", ("batch", "samples"), "mask"))

RECIPES: tuple[Recipe, ...] = (
    _recipe("t5", _whole, FULL_T5, SEQ2SEQ, "logits"),
    _recipe("t5_encoder", _encoder, FULL_T5, (IDS, MASK), "last_hidden_state"),
    _recipe(
        "t5_decoder",
        _decoder,
        FULL_T5,
        (*DECODING, ENCODED, ENCODED_MASK),
        "last_hidden_state",
    ),
    _step("t5_decoder_past", FULL_T5, (ENCODED, ENCODED_MASK)),
    _recipe("bart", _whole, FULL_BART, SEQ2SEQ, "logits"),
    _step("bart_decoder_past", FULL_BART, (ENCODED, ENCODED_MASK)),
    _recipe(
        "whisper_encoder",
        _encoder,
        FULL_WHISPER,
        (FEATURES,),
        "last_hidden_state",
        dtypes=("fp32", "fp16"),
    ),
    _recipe("whisper_decoder", _decoder, FULL_WHISPER, (*DECODING, ENCODED), "last_hidden_state"),
    _step("whisper_decoder_past", FULL_WHISPER, (ENCODED,)),
    _recipe(
        "wav2vec2",
        _alone,
        ("Wav2Vec2Model", "Wav2Vec2Config", WAV2VEC2),
        AUDIO,
        "last_hidden_state",
    ),
    _recipe(
        "wav2vec2_masked",
        _alone,
        ("Wav2Vec2Model", "Wav2Vec2Config", WAV2VEC2),
        AUDIO_MASKED,
        "last_hidden_state",
    ),
)
