"""The whole models: what they are built from, and how they are run. Weights are random, sizes are those of the originals."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from benchmarks.whole.building import IDS, Whole, of_transformers
from benchmarks.whole.decoders import DECODERS, cached
from benchmarks.whole.encoders import ENCODERS, images
from benchmarks.whole.spec import Case, Port, Spec
from models.adapters import Flat, hidden, logits, sample


class Speller(nn.Module):
    """The decoder of Whisper with its last projection, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.proj_out = model.get_decoder(), model.proj_out

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        found = self.decoder(**inputs, use_cache=False)
        return self.proj_out(found.last_hidden_state)


def itself(result: torch.Tensor) -> torch.Tensor:
    """The result as it is."""
    return result


def bert(small: bool) -> Whole:
    """BERT-base on a batch of which half is padding."""
    settings = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128} if small else {}
    batch, seq = (2, 16) if small else (8, 512)
    width = settings.get("hidden_size", 768)
    spec = Spec(
        "bert-base",
        (Port("input_ids", IDS, "ids", 30000), Port("attention_mask", IDS, "mask")),
        (Port("last_hidden_state", ("batch", "seq", width)),),
        (Case(f"{batch}x{seq}, half padding", {"batch": batch, "seq": seq}, padded=True),),
        "bert",
        settings.get("num_attention_heads", 12),
        width,
        small,
    )
    names = tuple(port.name for port in spec.inputs)
    return Whole(spec, lambda: Flat(of_transformers("BertModel", "BertConfig", settings), names, hidden))


def gpt2(small: bool) -> Whole:
    """GPT-2-medium without a cache."""
    heads, layers, width, vocabulary = (4, 2, 64, 999) if small else (16, 24, 1024, 50257)
    batch, seq = (2, 16) if small else (4, 1024)
    spec = Spec(
        "gpt2-medium",
        (Port("input_ids", IDS, "ids", vocabulary), Port("attention_mask", IDS, "mask")),
        (Port("logits", ("batch", "seq", vocabulary)),),
        (Case(f"{batch}x{seq}", {"batch": batch, "seq": seq}),),
        "gpt2",
        heads,
        width,
        small,
    )
    settings = {
        "n_head": heads,
        "n_layer": layers,
        "n_embd": width,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    names = tuple(port.name for port in spec.inputs)
    return Whole(spec, lambda: Flat(of_transformers("GPT2LMHeadModel", "GPT2Config", settings), names, logits, use_cache=False))


def vit(name: str, side: int, batch: int, small: bool) -> Whole:
    """ViT-L/16 on images of one size."""
    heads, layers, width, inner = (4, 2, 64, 128) if small else (16, 24, 1024, 4096)
    side, batch = (side // 7, 2) if small else (side, batch)
    settings = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "image_size": side,
        "patch_size": 16,
    }
    return images(name, "ViT", batch, (side // 16) ** 2 + 1, settings, small)


def unet(small: bool) -> Whole:
    """The UNet of Stable Diffusion 1.5."""
    side, text, tokens = (16, 32, 7) if small else (64, 768, 77)
    settings: dict[str, Any] = {"sample_size": side, "cross_attention_dim": text, "attention_head_dim": 8}
    if small:
        settings |= {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        }
    spec = Spec(
        "sd-unet",
        (
            Port("sample", ("batch", 4, side, side)),
            Port("timestep", ("batch",), "ids", 999),
            Port("encoder_hidden_states", ("batch", tokens, text)),
        ),
        (Port("out_sample", ("batch", 4, side, side)),),
        (Case(f"2x4x{side}x{side}", {"batch": 2, "seq": side * side}),),
        "unet",
        0,
        0,
        small,
    )

    def build() -> nn.Module:
        diffusers: Any = importlib.import_module("diffusers")
        model = diffusers.UNet2DConditionModel(**settings).to(torch.get_default_dtype()).eval()
        return Flat(model, tuple(port.name for port in spec.inputs), sample)

    return Whole(spec, build)


def whisper(part: str, small: bool) -> Whole:
    """Whisper-small: its encoder on 30 s of sound, or its decoder on 128 tokens."""
    heads, layers, width, inner, frames, vocabulary = (4, 2, 64, 128, 40, 999) if small else (12, 12, 768, 3072, 3000, 51865)
    batch, seq = (2, 16) if small else (8, 128)
    settings = {
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "max_source_positions": frames // 2,
        "vocab_size": vocabulary,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    encoded = Port("last_hidden_state", ("batch", frames // 2, width))
    encoder = part == "encoder"
    inputs = (
        (Port("input_features", ("batch", 80, frames)),)
        if encoder
        else (Port("input_ids", IDS, "ids", vocabulary), dataclasses.replace(encoded, name="encoder_hidden_states"))
    )
    spec = Spec(
        f"whisper-{part}",
        inputs,
        (encoded,) if encoder else (Port("logits", ("batch", "seq", vocabulary)),),
        (Case(f"{batch}x{frames // 2 if encoder else seq}", {"batch": batch, "seq": frames // 2 if encoder else seq}),),
        "bart",
        heads,
        width,
        small,
    )

    def build() -> nn.Module:
        model = of_transformers("WhisperForConditionalGeneration", "WhisperConfig", settings)
        return (
            Flat(model.get_encoder(), ("input_features",), hidden)
            if encoder
            else Flat(Speller(model), tuple(port.name for port in inputs), itself)
        )

    return Whole(spec, build)


def models(small: bool) -> dict[str, Whole]:
    """All of them, by name, in the order of their memory."""
    made = (
        bert(small),
        whisper("encoder", small),
        whisper("decoder", small),
        vit("vit-l-224", 224, 32, small),
        vit("vit-l-896", 896, 2, small),
        gpt2(small),
        unet(small),
        *(encoder(small) for encoder in ENCODERS),
        *(cached(decoder, small) for decoder in DECODERS),
    )
    return {whole.spec.name: whole for whole in made}
