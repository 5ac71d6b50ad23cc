"""Vision models of transformers: ViT, Swin, CLIP, the vision encoder of SAM."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from models.adapters import Flat, hidden
from models.recipe import Input, Recipe
from models.recipes_text import LAYERS, SIZE, model, names

SIDE = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
SAM = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "mlp_dim": 48,
    "image_size": 56,
    "patch_size": 8,
    "window_size": 4,
    "global_attn_indexes": [1],
    "output_channels": 16,
}
TEXT_INPUTS = (
    Input("input_ids", ("batch", "seq"), "ids"),
    Input("attention_mask", ("batch", "seq"), "mask"),
)


def _build(
    class_name: str,
    config_name: str,
    settings: dict[str, Any],
    inputs: tuple[Input, ...],
    attention: str,
) -> nn.Module:
    return Flat(model(class_name, config_name, settings, attention), names(inputs), hidden)


def _vision(name: str, prefix: str, settings: dict[str, Any], **more: Any) -> Recipe:
    """Returns the recipe of an image encoder; the classes are ``<prefix>Model`` and so on."""
    side = settings["image_size"]
    inputs = (Input("pixel_values", ("batch", 3, side, side)),)
    build = partial(_build, f"{prefix}Model", f"{prefix}Config", settings, inputs)
    return Recipe(name, build, inputs, ("last_hidden_state",), **more)


RECIPES: tuple[Recipe, ...] = (
    _vision("vit", "ViT", SIDE, dtypes=("fp32", "fp16")),
    _vision("swin", "Swin", SWIN),
    Recipe(
        "clip_text",
        partial(_build, "CLIPTextModel", "CLIPTextConfig", SIZE, TEXT_INPUTS),
        TEXT_INPUTS,
        ("last_hidden_state",),
    ),
    _vision("clip_vision", "CLIPVision", SIDE),
    _vision("sam_vision", "SamVision", SAM),
)
