"""Small models of transformers from configurations, with inputs and every kind of padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

VOCABULARY, BATCH, LENGTH = 99, 3, 7
PADDINGS = ("none", "full", "right", "left", "holes", "all")
"""`none`: no attention mask is given; `all`: one entry is nothing but padding."""
_SIZES: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}


def _bert(spelling: str, dropout: float) -> torch.nn.Module:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(vocab_size=VOCABULARY, attn_implementation=spelling, **_SIZES, **rates)
    return transformers.BertModel(config, add_pooling_layer=False)


def _gpt2(spelling: str, dropout: float) -> torch.nn.Module:
    rates = {"attn_pdrop": dropout, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, use_cache=False, attn_implementation=spelling, **rates
    )
    return transformers.GPT2LMHeadModel(config)


def _llama(spelling: str, dropout: float) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        use_cache=False,
        attention_dropout=dropout,
        attn_implementation=spelling,
        **_SIZES,
    )
    return transformers.LlamaForCausalLM(config)


def _mistral(spelling: str, dropout: float) -> torch.nn.Module:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        sliding_window=3,
        use_cache=False,
        attention_dropout=dropout,
        attn_implementation=spelling,
        **_SIZES,
    )
    return transformers.MistralForCausalLM(config)


def _t5(spelling: str, dropout: float) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=dropout, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit(spelling: str, dropout: float) -> torch.nn.Module:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout}
    config = transformers.ViTConfig(image_size=16, patch_size=4, attn_implementation=spelling, **_SIZES, **rates)
    return transformers.ViTModel(config, add_pooling_layer=False)


MODELS = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "t5": _t5, "vit": _vit}
SPELLINGS = [(name, spelling) for name in ("bert", "gpt2", "llama", "mistral", "vit") for spelling in ("eager", "sdpa")]
SPELLINGS += [("t5", "eager")]
"""T5 has one spelling only."""


def model(name: str, spelling: str, dropout: float = 0.0) -> torch.nn.Module:
    """A model in training mode, its parameters always the same."""
    torch.manual_seed(0)
    return MODELS[name](spelling, dropout).train()


def inputs(name: str, padding: str, batch: int = BATCH, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """What it is fed; images have no padding."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    tokens = torch.randint(VOCABULARY, (batch, length), generator=generator)
    found = {"input_ids": tokens} if padding == "none" else {"input_ids": tokens, "attention_mask": _mask(padding, batch, length)}
    return found | {"decoder_input_ids": tokens.flip(1)} if name == "t5" else found


def _mask(padding: str, batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    if padding == "right":
        mask[0, length // 2 :] = 0
    elif padding == "left":
        mask[0, : length // 2] = 0
    elif padding == "holes":
        mask[0, 1:3] = 0
    elif padding == "all":
        mask[0] = 0
        mask[1, : length // 2] = 0
    return mask
