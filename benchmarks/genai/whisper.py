"""A small Whisper of transformers in onnxruntime-genai: its encoder and its decoder exported, recordings continued by both.

The encoder gives keys and values for every layer of the decoder too, as `docs/serving.md` has it.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

from benchmarks.genai import architectures, folders, runs
from models import recipes_text
from models.adapters import Cached, hidden
from models.recipe import Input, Recipe

EXPORTED = ("dyn18", "ts17")
_LAYERS, _HEADS, _HEAD, _MELS, _FRAMES, _VOCABULARY, _START = 2, 4, 16, 10, 3000, 499, 2
_SETTINGS: dict[str, Any] = {
    **{f"{part}_{what}": number for part in ("encoder", "decoder") for what, number in (("layers", _LAYERS), ("ffn_dim", 48))},
    **{f"{part}_attention_heads": _HEADS for part in ("encoder", "decoder")},
    "d_model": _HEADS * _HEAD,
    "num_mel_bins": _MELS,
    "vocab_size": _VOCABULARY,
    "tie_word_embeddings": False,
    "max_source_positions": _FRAMES // 2,
    "max_target_positions": 128,
    "decoder_start_token_id": _START,
    "pad_token_id": runs.PAD,
    "bos_token_id": runs.EOS,
    "eos_token_id": runs.EOS,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_PARTS = tuple((layer, part) for layer in range(_LAYERS) for part in ("key", "value"))


class _Encoder(nn.Module):
    """The encoder, with the decoder's projections of what it made."""

    def __init__(self, whisper: Any) -> None:
        super().__init__()
        self.whisper = whisper

    def forward(self, audio_features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Hidden states, then a key and a value for each layer, (b, heads, frames / 2, head size)."""
        made = self.whisper.model.encoder(audio_features).last_hidden_state
        given = [made]
        for layer in self.whisper.model.decoder.layers:
            cross = layer.encoder_attn
            shape = made.shape[0], -1, cross.num_heads, cross.head_dim
            given += [project(made).view(shape).transpose(1, 2) for project in (cross.k_proj, cross.v_proj)]
        return tuple(given)


class _Decoder(nn.Module):
    """The decoder with its head."""

    def __init__(self, whisper: Any) -> None:
        super().__init__()
        self.whisper = whisper

    def forward(self, **given: Any) -> Any:
        """What the decoder gives, logits in the place of hidden states."""
        found = self.whisper.model.decoder(**given)
        found.last_hidden_state = self.whisper.proj_out(found.last_hidden_state)
        return found


@functools.cache
def model() -> Any:
    """The model of transformers with peaky weights, the same every time."""
    source = "WhisperForConditionalGeneration", "WhisperConfig", _SETTINGS
    return Recipe("whisper", lambda attention: recipes_text.model(*source, attention), ()).module("sdpa")


def served(exporter: str, folder: pathlib.Path) -> pathlib.Path:
    """A folder with encoder, decoder and config, each of an export by `exporter`."""
    model().config.save_pretrained(folder / "transformers")
    made = folder / exporter
    made.mkdir(parents=True, exist_ok=True)
    features = Input("audio_features", ("batch", _MELS, _FRAMES))
    cross = tuple(f"present_{part}_cross_{layer}" for layer, part in _PARTS)
    encoder = Recipe("encoder", _Encoder, (features,), ("encoder_hidden_states", *cross))
    architectures.write(encoder, _Encoder(model()), exporter, folder / f"encoder_{exporter}.onnx")
    own = (
        Input("input_ids", ("batch", "seq"), "ids", high=_VOCABULARY),
        Input("encoder_hidden_states", ("batch", _FRAMES // 2, _HEADS * _HEAD)),
    )
    pasts = tuple(Input(f"past_key_values.{layer}.{part}", ("batch", _HEADS, "past", _HEAD)) for layer, part in _PARTS)
    made_before = (Input(f"past_{part}_cross_{layer}", ("batch", _HEADS, _FRAMES // 2, _HEAD)) for layer, part in _PARTS)
    names = (f"{prefix}_{part}_{layer}" for prefix in ("past", "cross") for layer, part in _PARTS)
    decoder = Cached(_Decoder(model()), (*recipes_text.names(own), *names), hidden)
    presents = (f"present.{layer}.{part}" for layer, part in _PARTS)
    recipe = Recipe("decoder", _Decoder, (*own, *pasts, *made_before), ("logits", *presents))
    architectures.write(recipe, decoder, exporter, folder / f"decoder_{exporter}.onnx")
    folders.fused(folder / f"encoder_{exporter}.onnx", made / "encoder.onnx")
    folders.shared(folder / f"decoder_{exporter}.onnx", folder / "transformers", made)
    return made


def continued(folder: pathlib.Path, count: int, steps: int) -> runs.Comparison:
    """Recordings with a prompt of four tokens each, continued by onnxruntime-genai and by transformers."""
    rng = np.random.default_rng(count)
    audio = rng.standard_normal((count, _MELS, _FRAMES)).astype(np.float32)
    prompts = [[_START, *rng.integers(_START + 1, _VOCABULARY, 3).tolist()] for _ in range(count)]
    truth = GenerationMixin.generate(
        model(),
        input_features=torch.tensor(audio),
        decoder_input_ids=torch.tensor(prompts),
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        eos_token_id=runs.EOS,
        pad_token_id=runs.PAD,
        output_logits=True,
        return_dict_in_generate=True,
    )
    wanted = runs.generated_by_torch(truth, len(prompts[0]))
    return runs.compared(runs.Genai(folder).generated(prompts, steps, {"audio_features": audio}), wanted)
