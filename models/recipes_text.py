"""Text models of transformers: encoders, and decoders with and without a past."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers
from torch import nn

from models.adapters import Cached, Flat, hidden, logits
from models.recipe import Input, Recipe

LAYERS = 2
HEAD = 8
IDS = Input("input_ids", ("batch", "seq"), "ids")
MASK = Input("attention_mask", ("batch", "seq"), "mask")
POSITIONS = Input("position_ids", ("batch", "seq"), "positions")

#: The sizes of nearly every config; what a family calls them differs.
SIZE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
GROUPED = {**SIZE, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Text:
    """One text family.

    Attributes:
        name: The family.
        model: Class name of the model in transformers.
        config: Class name of its config.
        settings: Arguments of the config.
        kv_heads: Heads of a past key; 0 for encoders, which have no past.
        rotary: Whether the variant with a past takes position ids too; without them, as in the
            variant without a past, one row of rotary angles serves the whole batch.
        attentions: As in `Recipe`.
        dtypes: As in `Recipe`.
    """

    name: str
    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=lambda: SIZE)
    kv_heads: int = 0
    rotary: bool = False
    attentions: tuple[str, ...] = ("eager", "sdpa")
    dtypes: tuple[str, ...] = ("fp32",)


EAGER = ("eager",)
HALVES = ("fp32", "fp16", "bf16")
SLIDING = {**GROUPED, "sliding_window": 4}
LOCAL = {
    **SLIDING,
    "head_dim": HEAD,
    "query_pre_attn_scalar": HEAD,
    "layer_types": ["sliding_attention", "full_attention"],
}

FAMILIES: tuple[Text, ...] = (
    Text("bert", "BertModel", "BertConfig", dtypes=HALVES),
    Text("roberta", "RobertaModel", "RobertaConfig"),
    Text(
        "distilbert",
        "DistilBertModel",
        "DistilBertConfig",
        {
            "vocab_size": 99,
            "dim": 32,
            "n_layers": LAYERS,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    Text("albert", "AlbertModel", "AlbertConfig", {**SIZE, "embedding_size": 16}),
    Text(
        "deberta_v2",
        "DebertaV2Model",
        "DebertaV2Config",
        {
            **SIZE,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        attentions=EAGER,
    ),
    Text(
        "modernbert",
        "ModernBertModel",
        "ModernBertConfig",
        {
            **SIZE,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 1,
        },
    ),
    Text(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        kv_heads=4,
        dtypes=("fp32", "fp16"),
    ),
    Text("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", kv_heads=4, rotary=True),
    Text(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "gelu"},
        kv_heads=4,
    ),
    Text(
        "bloom",
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "n_layer": LAYERS,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        kv_heads=4,
        attentions=EAGER,
    ),
    Text("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED, kv_heads=2, rotary=True, dtypes=HALVES),
    Text("mistral", "MistralForCausalLM", "MistralConfig", SLIDING, kv_heads=2, rotary=True),
    Text("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED, kv_heads=2, rotary=True),
    Text("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": HEAD}, kv_heads=2, rotary=True),
    Text("phi3", "Phi3ForCausalLM", "Phi3Config", GROUPED, kv_heads=2, rotary=True),
    Text(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**LOCAL, "attn_logit_softcapping": 5.0},
        kv_heads=2,
        rotary=True,
        attentions=EAGER,
    ),
    Text("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", LOCAL, kv_heads=2, rotary=True),
)


def model(class_name: str, config_name: str, settings: dict[str, Any], attention: str) -> nn.Module:
    """Builds a transformers model from a config, with random weights."""
    config = getattr(transformers, config_name)(**settings)
    return getattr(transformers, class_name)._from_config(config, attn_implementation=attention)


def names(inputs: tuple[Input, ...]) -> tuple[str, ...]:
    """Returns the names of the inputs."""
    return tuple(given.name for given in inputs)


def past_inputs(kv_heads: int, prefix: str = "past", axis: str | int = "past") -> tuple[Input, ...]:
    """Returns the inputs that carry one cache: a key and a value per layer."""
    return tuple(
        Input(f"{prefix}_{part}_{layer}", ("batch", kv_heads, axis, HEAD)) for layer in range(LAYERS) for part in ("key", "value")
    )


def present_names() -> tuple[str, ...]:
    """Returns the names of the outputs that carry the cache on."""
    return tuple(f"present_{part}_{layer}" for layer in range(LAYERS) for part in ("key", "value"))


def _plain(family: Text, attention: str) -> nn.Module:
    built = model(family.model, family.config, family.settings, attention)
    if family.kv_heads:
        return Flat(built, names((IDS, MASK)), logits, use_cache=False)
    return Flat(built, names((IDS, MASK)), hidden)


def _with_past(family: Text, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    built = model(family.model, family.config, family.settings, attention)
    return Cached(built, names(inputs), logits)


def _recipes(family: Text) -> list[Recipe]:
    """Returns the recipe of a family and, for a decoder, the one with a past."""
    common: dict[str, Any] = {"attentions": family.attentions, "dtypes": family.dtypes}
    output = "logits" if family.kv_heads else "last_hidden_state"
    plain = Recipe(family.name, partial(_plain, family), (IDS, MASK), (output,), **common)
    if not family.kv_heads:
        return [plain]
    mask = Input("attention_mask", ("batch", "past+seq"), "mask")
    positions = (POSITIONS,) if family.rotary else ()
    inputs = (IDS, mask, *positions, *past_inputs(family.kv_heads))
    outputs = ("logits", *present_names())
    build = partial(_with_past, family, inputs)
    return [plain, Recipe(f"{family.name}_past", build, inputs, outputs, **common)]


RECIPES: tuple[Recipe, ...] = tuple(made for family in FAMILIES for made in _recipes(family))
