"""Image generation models of diffusers: UNet, VAE, and two diffusion transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers.models import attention_processor
from torch import nn

from models.adapters import Flat, sample
from models.recipe import Input, Recipe
from models.recipes_text import names

UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 20,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
VAE = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}
DIT = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "num_embeds_ada_norm": 100,
}
#: diffusers picks the implementation by processor, not by a setting of the config.
PROCESSORS = {
    "eager": attention_processor.AttnProcessor,
    "sdpa": attention_processor.AttnProcessor2_0,
}
UNET_INPUTS = (
    Input("sample", ("batch", 4, "height", "width")),
    Input("timestep", ("batch",), "ids"),
    Input("encoder_hidden_states", ("batch", "seq", 20)),
)
VAE_INPUTS = (Input("sample", ("batch", 3, "height", "width")),)
SD3_INPUTS = (
    Input("hidden_states", ("batch", 4, 8, 8)),
    Input("encoder_hidden_states", ("batch", "seq", 20)),
    Input("pooled_projections", ("batch", 16)),
    Input("timestep", ("batch",), "ids"),
)
DIT_INPUTS = (
    Input("hidden_states", ("batch", 4, 8, 8)),
    Input("timestep", ("batch",), "ids"),
    Input("class_labels", ("batch",), "ids"),
)


def _build(class_name: str, settings: dict[str, Any], inputs: tuple[Input, ...], attention: str) -> nn.Module:
    model = getattr(diffusers, class_name)(**settings)
    if class_name != "SD3Transformer2DModel":  # joint attention has one processor only
        for part in model.modules():
            if isinstance(part, attention_processor.Attention):
                part.set_processor(PROCESSORS[attention]())
    return Flat(model, names(inputs), sample)


def _recipe(name: str, class_name: str, settings: dict[str, Any], inputs: tuple[Input, ...], **more: Any) -> Recipe:
    build = partial(_build, class_name, settings, inputs)
    return Recipe(name, build, inputs, ("out_sample",), **more)


RECIPES: tuple[Recipe, ...] = (
    _recipe("unet", "UNet2DConditionModel", UNET, UNET_INPUTS, dtypes=("fp32", "fp16")),
    _recipe("vae", "AutoencoderKL", VAE, VAE_INPUTS),
    _recipe("sd3", "SD3Transformer2DModel", SD3, SD3_INPUTS, attentions=("sdpa",)),
    _recipe("dit", "DiTTransformer2DModel", DIT, DIT_INPUTS),
)
