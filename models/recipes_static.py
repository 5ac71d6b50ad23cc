"""Decoders of transformers with a static cache: a buffer of a fixed length that new keys and values are written into."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.adapters import Static, logits
from models.recipe import Input, Recipe
from models.recipes_text import FAMILIES, IDS, Text, model, names, past_inputs, present_names

LENGTH = 32
_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "gemma2")


def _build(family: Text, inputs: tuple[Input, ...], attention: str) -> nn.Module:
    return Static(model(family.model, family.config, family.settings, attention), names(inputs), logits)


def _recipe(family: Text) -> Recipe:
    mask, positions = Input("attention_mask", ("batch", LENGTH), "mask"), Input("cache_position", ("seq",), "positions")
    inputs = (IDS, mask, positions, *past_inputs(family.kv_heads, axis=LENGTH))
    outputs = ("logits", *present_names())
    return Recipe(f"{family.name}_static", partial(_build, family, inputs), inputs, outputs, family.attentions)


RECIPES: tuple[Recipe, ...] = tuple(_recipe(family) for family in FAMILIES if family.name in _FAMILIES)
"""Every recipe of a decoder that writes into its cache."""
