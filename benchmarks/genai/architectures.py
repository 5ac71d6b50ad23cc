"""Decoders of transformers as they are exported for generation: random peaky weights, a growing cache, every length dynamic.

They are recipes of the zoo (`models/recipe.py`), with the names of inputs and outputs that exports for onnxruntime-genai have,
and room for longer texts.
"""

from __future__ import annotations

import dataclasses
import pathlib
from functools import partial
from typing import Any

import torch
from torch import nn

from models import recipes_text
from models.adapters import Cached, logits
from models.exporters import export_module, said_by
from models.recipe import Input, Recipe
from models.recipes_text import GROUPED, IDS, LOCAL, POSITIONS, SIZE

EXPORTED = ("dyn18", "ts17")
_HEAD, _LENGTH, _VOCABULARY = 16, 128, 499
_MORE: dict[str, Any] = {"max_position_embeddings": _LENGTH, "vocab_size": _VOCABULARY, "hidden_size": 4 * _HEAD}
_MORE |= {"tie_word_embeddings": False}  # else the last token wins by far
_SIZE, _GROUPED = SIZE | _MORE, GROUPED | _MORE
_LOCAL = LOCAL | _MORE | {"head_dim": _HEAD, "query_pre_attn_scalar": _HEAD, "sliding_window": 6}
_GPT2 = {"n_embd": 4 * _HEAD, "n_layer": 2, "n_head": 4, "n_positions": _LENGTH, "tie_word_embeddings": False}
_TOKENS = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 4 * _HEAD, "activation_function": "gelu"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}

_QWEN_EXPERTS = {"head_dim": _HEAD, "num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
_QWEN_EXPERTS |= {"experts_implementation": "batched_mm"}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder.

    Attributes:
        name: What it is called.
        family: What its classes in transformers are called, before `ForCausalLM` and `Config`.
        settings: Arguments of the config.
        kv_heads: Heads of a past key.
        model: The class of the model where the family does not tell.
        config: The class of the config where the family does not tell.
        attention: The implementation of attention that is exported.
        positions: Whether the export takes positions.
        exporters: Those that export it; TorchScript ends with an AssertionError where Cohere interleaves its angles.
        head: The channels of a head.
        layers: The number of layers.
    """

    name: str
    family: str
    settings: dict[str, Any]
    kv_heads: int = 2
    model: str = ""
    config: str = ""
    attention: str = "sdpa"
    positions: bool = True
    exporters: tuple[str, ...] = EXPORTED
    head: int = _HEAD
    layers: int = 2


_ALL = (
    Decoder("llama", "Llama", _GROUPED),
    Decoder("mistral, window", "Mistral", _GROUPED | {"sliding_window": 6}),
    Decoder("qwen2, biases", "Qwen2", _GROUPED),
    Decoder("qwen3, norms of q and k", "Qwen3", _GROUPED | {"head_dim": _HEAD}),
    Decoder("gemma, one head of keys", "Gemma", _GROUPED | {"head_dim": _HEAD, "num_key_value_heads": 1}, kv_heads=1),
    Decoder("gemma2, cap and windows", "Gemma2", _LOCAL | {"attn_logit_softcapping": 5.0}, attention="eager"),
    Decoder("gemma3, windows", "Gemma3", _LOCAL, config="Gemma3TextConfig"),
    Decoder("gpt2", "GPT2", _GPT2 | _TOKENS, 4, model="GPT2LMHeadModel"),
    Decoder("gpt_neox, partly rotary", "GPTNeoX", _SIZE, 4),
    Decoder("opt, counts positions", "OPT", _SIZE | _OPT, 4, positions=False),
    Decoder("phi, partly rotary", "Phi", _SIZE, 4),
    Decoder("phi3, one projection", "Phi3", _GROUPED),
    Decoder("granite", "Granite", _GROUPED),
    Decoder("olmo2, norms of q and k", "Olmo2", _GROUPED),
    Decoder("cohere, rotary in pairs", "Cohere", _GROUPED, exporters=("dyn18",)),
    Decoder("smollm3, rotary in some layers", "SmolLM3", _GROUPED | {"no_rope_layers": [1, 0]}),
    Decoder("stablelm, partly rotary", "StableLm", _GROUPED),
    Decoder("starcoder2, biases", "Starcoder2", _GROUPED),
    Decoder("falcon, one head of keys", "Falcon", _SIZE | {"multi_query": True, "bias": False}, 1),
    Decoder("gpt_bigcode, one head of keys", "GPTBigCode", _GPT2 | _TOKENS | {"multi_query": True}, 1),
    Decoder("gptj, rotary in pairs", "GPTJ", _GPT2 | _TOKENS | {"rotary_dim": 8}, 4, attention="eager"),
    Decoder("nemotron, squared activation", "Nemotron", _GROUPED),
    Decoder("mixtral, experts", "Mixtral", _GROUPED | _EXPERTS),
    Decoder("qwen3_moe, experts", "Qwen3Moe", _GROUPED | _QWEN_EXPERTS),
    Decoder("gpt_oss, sinks, windows, experts", "GptOss", _LOCAL | _EXPERTS, attention="eager"),
)
ARCHITECTURES = {item.name.partition(",")[0]: item for item in _ALL}
"""Decoders by the first word of their names."""


def recipe(decoder: Decoder) -> Recipe:
    """How a decoder is built and exported."""
    mask = Input("attention_mask", ("batch", "past+seq"), "mask")
    cache = ("batch", decoder.kv_heads, "past", decoder.head)
    places = [(layer, part) for layer in range(decoder.layers) for part in ("key", "value")]
    own = (IDS, mask, *((POSITIONS,) if decoder.positions else ()))
    ids = dataclasses.replace(IDS, high=decoder.settings["vocab_size"])
    given = (ids, *own[1:], *(Input(f"past_key_values.{layer}.{part}", cache) for layer, part in places))
    made = ("logits", *(f"present.{layer}.{part}" for layer, part in places))
    names = (*recipes_text.names(own), *(f"past_{part}_{layer}" for layer, part in places))
    name = decoder.name.partition(",")[0]  # the seed of the weights, which what is said of it does not change
    return Recipe(name, partial(_cached, decoder, names), given, made, (decoder.attention,))


def _cached(decoder: Decoder, names: tuple[str, ...], attention: str) -> nn.Module:
    model, config = decoder.model or f"{decoder.family}ForCausalLM", decoder.config or f"{decoder.family}Config"
    return Cached(recipes_text.model(model, config, dict(decoder.settings), attention), names, logits)


def model(decoder: Decoder) -> Any:
    """The model of transformers by itself, with the weights of the export."""
    return recipe(decoder).module(decoder.attention).model


def export(decoder: Decoder, exporter: str, path: pathlib.Path) -> None:
    """Writes an export; `exporter` is ``dyn`` or ``ts`` and the opset."""
    made = recipe(decoder)
    write(made, made.module(decoder.attention), exporter, path)


def write(made: Recipe, module: nn.Module, exporter: str, path: pathlib.Path) -> None:
    """Writes an export of a module whose axes are all dynamic."""
    dynamic = frozenset(part for axes in made.axes().values() for axis in axes.values() for part in axis.split("+"))
    with torch.no_grad():
        export_module(made, module.eval(), made.example(), exporter, path, dynamic=dynamic)


def exporter_names() -> str:
    """The names of the exporters, in words."""
    said = [(name, *said_by(name)) for name in EXPORTED]
    return ", ".join(f"{name} is {'dynamo' if dynamo else 'TorchScript'} at opset {opset}" for name, dynamo, opset in said)
