"""The whole models of transformers and diffusers: random weights, the sizes of the originals; small stand-ins try them out."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.whole.spec import IDS, MASK, Case, Whole
from models.adapters import Cached, Flat, hidden, logits, sample
from models.recipe import Input

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_SMALL: Mapping[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_WORDS = 30000


def of_transformers(model: str, config: str, settings: Mapping[str, Any]) -> Any:
    """A model of transformers with torch's attention where it has that, in the default element type."""
    import transformers

    made, kind = getattr(transformers, config)(**settings), getattr(transformers, model)
    attention = "sdpa" if kind._supports_sdpa else "eager"
    return kind._from_config(made, attn_implementation=attention, dtype=torch.get_default_dtype()).eval()


@dataclasses.dataclass(frozen=True)
class Encoder:
    """An encoder of texts, of which half is padding, or of images.

    Attributes:
        name: Its name in the tables.
        family: What the classes of its model and its configuration begin with.
        batch: Entries.
        seq: Tokens of the longest text; 0 for images.
        settings: The configuration beside its defaults.
        small: What the stand-in has in the place of that.
        model: The class of the model behind `family`.
    """

    name: str
    family: str
    batch: int
    seq: int
    settings: Mapping[str, Any]
    small: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _SMALL)
    model: str = "Model"


_LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_VIT = {**_LARGE, "patch_size": 16}
_XLMR = {**_LARGE, "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
_T5 = {"d_model": 768, "num_heads": 12, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "feed_forward_proj": "relu"}
_SMALL_T5 = {"d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "num_layers": 2}
_MODERN = {**_LARGE, "num_hidden_layers": 12, "intermediate_size": 2624, **_SPECIAL, "cls_token_id": 1, "sep_token_id": 1}
_DINO = {"num_hidden_layers": 12, "hidden_size": 1280, "num_attention_heads": 20, "intermediate_size": 5120}
_DINO |= {"image_size": 448, "patch_size": 16, "num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"}
ENCODERS = (
    Encoder("bert-base", "Bert", 8, 512, {"hidden_size": 768, "num_attention_heads": 12}),
    Encoder("vit-l-224", "ViT", 32, 0, {**_VIT, "image_size": 224}, {**_SMALL, "image_size": 32}),
    Encoder("vit-l-896", "ViT", 2, 0, {**_VIT, "image_size": 896}, {**_SMALL, "image_size": 128}),
    Encoder("xlmr-large", "XLMRoberta", 16, 256, _XLMR),
    Encoder("t5-base-enc", "T5", 8, 512, _T5, _SMALL_T5, "EncoderModel"),
    Encoder("modernbert-12l", "ModernBert", 16, 512, _MODERN),
    Encoder("dinov3-h-12l", "DINOv3ViT", 8, 0, _DINO, {**_SMALL, "image_size": 64}),
)


def encoded(encoder: Encoder, *, small: bool) -> Whole:
    """An encoder with its inputs."""
    made = {**encoder.settings, **(encoder.small if small else {})}
    width, heads = (
        made.get(name) or made[other] for name, other in (("hidden_size", "d_model"), ("num_attention_heads", "num_heads"))
    )
    batch, seq, side = 2 if small else encoder.batch, 16 if small else encoder.seq, made.get("image_size", 0)
    if side:
        seq = (side // made["patch_size"]) ** 2 + 1 + made.get("num_register_tokens", 0)
        inputs = (Input("pixel_values", ("batch", 3, side, side)),)
    else:
        inputs = (Input("input_ids", IDS, "ids", _WORDS), Input("attention_mask", IDS, "mask"))
    label = f"{batch}x{seq}" + ", half padding" * (not side)
    case = Case(label, {"batch": batch, "seq": seq}, padded=not side)
    outputs, select = (Input("last_hidden_state", ("batch", seq if side else "seq", width)),), hidden
    if encoder.model.endswith("Classification"):
        outputs, select = (Input("logits", ("batch", 2)),), logits
    classes = (f"{encoder.family}{encoder.model}", f"{encoder.family}Config", made)
    return Whole(encoder.name, inputs, outputs, (case,), _flat(inputs, select, *classes), "vit" if side else "bert", heads, width)


def _flat(inputs: tuple[Input, ...], select: Callable[[Any], Any], *classes: Any, **fixed: Any) -> Callable[[], nn.Module]:
    """What builds a model of transformers that is given its inputs by position."""
    return lambda: Flat(of_transformers(*classes), tuple(port.name for port in inputs), select, **fixed)


def gpt2(*, small: bool) -> Whole:
    """GPT-2-medium without a cache."""
    heads, layers, width, vocabulary = (4, 2, 64, 999) if small else (16, 24, 1024, 50257)
    batch, seq = (2, 16) if small else (4, 1024)
    inputs = (Input("input_ids", IDS, "ids", vocabulary), Input("attention_mask", IDS, "mask"))
    settings = {
        "n_head": heads,
        "n_layer": layers,
        "n_embd": width,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    outputs, cases = (Input("logits", ("batch", "seq", vocabulary)),), (Case(f"{batch}x{seq}", {"batch": batch, "seq": seq}),)
    build = _flat(inputs, logits, "GPT2LMHeadModel", "GPT2Config", settings, use_cache=False)
    return Whole("gpt2-medium", inputs, outputs, cases, build, "gpt2", heads, width)


def unet(*, small: bool) -> Whole:
    """The UNet of Stable Diffusion 1.5."""
    side, text, tokens = (16, 32, 7) if small else (64, 768, 77)
    settings: dict[str, Any] = {"sample_size": side, "cross_attention_dim": text, "attention_head_dim": 8}
    if small:
        settings |= {"block_out_channels": (32, 64), "layers_per_block": 1}
        settings |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        settings |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    inputs = (
        Input("sample", ("batch", 4, side, side)),
        Input("timestep", ("batch",), "ids", 999),
        Input("encoder_hidden_states", ("batch", tokens, text)),
    )
    outputs = (Input("out_sample", ("batch", 4, side, side)),)

    def build() -> nn.Module:
        diffusers: Any = importlib.import_module("diffusers")
        model = diffusers.UNet2DConditionModel(**settings).to(torch.get_default_dtype()).eval()
        return Flat(model, tuple(port.name for port in inputs), sample)

    return Whole("sd-unet", inputs, outputs, (Case(f"2x4x{side}x{side}", {"batch": 2, "seq": side * side}),), build, "unet")


class Speller(nn.Module):
    """The decoder of Whisper with its last projection, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.proj_out = model.get_decoder(), model.proj_out

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.proj_out(self.decoder(**inputs, use_cache=False).last_hidden_state)


def whisper(part: str, *, small: bool, layers: int = 12) -> Whole:
    """Whisper-small: its encoder on 30 s of sound, or its decoder on 128 tokens."""
    sizes = (4, 2, 64, 128, 40, 999) if small else (12, layers, 768, 3072, 3000, 51865)
    heads, layers, width, inner, frames, vocabulary = sizes
    settings = {"d_model": width, "max_source_positions": frames // 2, "vocab_size": vocabulary, **_SPECIAL}
    settings |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    for side in ("encoder", "decoder"):
        settings |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": inner}
    states = ("batch", frames // 2, width)
    encoder = part == "encoder"
    seq = frames // 2 if encoder else 16 if small else 128
    inputs = (Input("input_features", ("batch", 80, frames)),)
    outputs = (Input("last_hidden_state", states),)
    if not encoder:
        inputs = (Input("input_ids", IDS, "ids", vocabulary), Input("encoder_hidden_states", states))
        outputs = (Input("logits", ("batch", "seq", vocabulary)),)
    batch = 2 if small else 8

    def build() -> nn.Module:
        model = of_transformers("WhisperForConditionalGeneration", "WhisperConfig", settings)
        if encoder:
            return Flat(model.get_encoder(), ("input_features",), hidden)
        return Flat(Speller(model), tuple(port.name for port in inputs), lambda result: result)

    case = Case(f"{batch}x{seq}", {"batch": batch, "seq": seq})
    return Whole(f"whisper-{part}", inputs, outputs, (case,), build, "bart", heads, width)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder of transformers with its cache.

    Attributes:
        name: Its name in the tables.
        family: What the class of its model begins with.
        heads: Heads of queries, and of keys and values.
        head: Channels of a head.
        sizes: Layers, channels, channels between the products of a layer, and tokens.
        settings: Its configuration beside that.
        small: What the stand-in has in the place of that.
        config: What the class of its configuration begins with, where that differs from `family`.
        prompts: Entries of the batches of prompts.
        model: The class of the model behind `family`.
    """

    name: str
    family: str
    heads: tuple[int, int]
    head: int
    sizes: tuple[int, int, int, int]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    config: str = ""
    prompts: tuple[int, ...] = (1, 8)
    model: str = "ForCausalLM"


_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 64, "experts_implementation": "batched_mm"}
"""Each token gathers the weights of its experts: the only form that torch exports. A loop over the experts that are hit fails, as
their number is not known, and `grouped_mm` has no form in ONNX."""
_GEMMA3 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512}
_SMALL_GEMMA3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
_MOE = {**_EXPERTS, "num_experts": 16, "moe_intermediate_size": 768}
_SMALL_MOE = {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32}
DECODERS = (
    Decoder("qwen2-0.5b", "Qwen2", (14, 2), 64, (24, 896, 4864, 151936), _TIED),
    Decoder("qwen3-0.6b", "Qwen3", (16, 8), 128, (28, 1024, 3072, 151936), {**_TIED, "head_dim": 128}, {"head_dim": 16}),
    Decoder("gemma3-1b", "Gemma3", (4, 1), 256, (26, 1152, 6912, 262144), _GEMMA3, _SMALL_GEMMA3, "Gemma3Text"),
    Decoder("qwen3-moe", "Qwen3Moe", (16, 4), 64, (12, 1024, 3072, 32000), _MOE, _SMALL_MOE, prompts=(1,)),
    Decoder("llama-1b", "Llama", (32, 4), 64, (22, 2048, 5632, 32000)),
)
"""In the order of their memory."""


def cached(decoder: Decoder, *, small: bool) -> Whole:
    """A decoder with its cache; the past may be empty."""
    heads, kv_heads = (4, 2) if small else decoder.heads
    layers, width, inner, vocabulary = (2, 64, 128, 999) if small else decoder.sizes
    head, past, steps = (16, 16, 4) if small else (decoder.head, 512, 128)
    parts = [f"{part}_{layer}" for layer in range(layers) for part in ("key", "value")]
    inputs = (
        *(
            Input("input_ids", IDS, "ids", vocabulary),
            Input("attention_mask", MASK, "mask"),
            Input("position_ids", IDS, "positions"),
        ),
        *(Input(f"past_{part}", ("batch", kv_heads, "past", head)) for part in parts),
    )
    outputs = (
        Input("logits", ("batch", "seq", vocabulary)),
        *(Input(f"present_{part}", ("batch", kv_heads, "past+seq", head)) for part in parts),
    )
    prefill = [Case(f"prefill {batch}x{past}", {"batch": batch, "seq": past, "past": 0}) for batch in decoder.prompts]
    decode = [Case(f"decode {batch}x1 at {past}", {"batch": batch, "seq": 1, "past": past}, steps=steps) for batch in (1, 8)]
    settings = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        **_SPECIAL,
        **decoder.settings,
        **(decoder.small if small else {}),
    }
    names = tuple(port.name for port in inputs)
    classes = f"{decoder.family}{decoder.model}", f"{decoder.config or decoder.family}Config"
    return Whole(
        decoder.name,
        inputs,
        outputs,
        (prefill[0], *decode, *prefill[1:]),
        lambda: Cached(of_transformers(*classes, settings), names, logits),
        "qwen3",
        heads,
        width,
    )


def models(*, small: bool) -> dict[str, Whole]:
    """All of them, by name."""
    made = (
        *(encoded(encoder, small=small) for encoder in ENCODERS),
        *(whisper(part, small=small) for part in ("encoder", "decoder")),
        *(gpt2(small=small), unet(small=small)),
        *(cached(decoder, small=small) for decoder in DECODERS),
    )
    return {whole.name: whole for whole in made}
