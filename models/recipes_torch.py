"""The attention modules of torch itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models.recipe import Input, Recipe

WIDTH = 32
HEADS = 4
X = Input("x", ("batch", "seq", WIDTH))
SOURCE = Input("source", ("batch", "source", 20))
PADDING = Input("padding", ("batch", "seq"), "padding")


class Attention(nn.Module):
    """`torch.nn.MultiheadAttention` on itself, with any of its masks.

    ``eager`` asks for the attention weights too, which takes another path inside torch.
    """

    def __init__(self, attention: str, *, causal: bool = False) -> None:
        """Builds the layer."""
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.weights, self.causal = attention == "eager", causal

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends; the second result is the mean of the weights over the heads."""
        mask = triangle(x) if self.causal else None
        result, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=self.weights)
        return (result, weights) if self.weights else result


class CrossAttention(nn.Module):
    """`torch.nn.MultiheadAttention` on a source of another width."""

    def __init__(self, attention: str) -> None:
        """Builds the layer."""
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=20, vdim=20, batch_first=True)
        self.weights = attention == "eager"

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Attends from `x` to `source`."""
        return self.attention(x, source, source, need_weights=self.weights)[0]


class Encoder(nn.Module):
    """`torch.nn.TransformerEncoder`, two layers."""

    def __init__(self, attention: str, *, causal: bool = False) -> None:
        """Builds the stack; there is only one implementation of its attention."""
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True, norm_first=causal)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal = causal

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Encodes; the mask stays a tensor."""
        mask = triangle(x) if self.causal else None
        return self.encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=False)


class Decoder(nn.Module):
    """`torch.nn.TransformerDecoder`, two layers, causal."""

    def __init__(self, attention: str) -> None:
        """Builds the stack; there is only one implementation of its attention."""
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.memory = nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Decodes on top of `source`; the mask becomes a flag."""
        return self.decoder(x, self.memory(source), tgt_mask=triangle(x), tgt_is_causal=True)


def triangle(x: torch.Tensor) -> torch.Tensor:
    """Returns the causal mask for ``(batch, seq, width)``: True where attention is forbidden."""
    length = x.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)


def _mha(name: str, inputs: tuple[Input, ...], *, causal: bool = False) -> list[Recipe]:
    """Returns both implementations; they differ in the number of outputs."""

    def build(attention: str) -> nn.Module:
        return Attention(attention, causal=causal)

    return [
        Recipe(name, build, inputs, ("output",), attentions=("sdpa",), dtypes=("fp32", "fp16")),
        Recipe(f"{name}_weights", build, inputs, ("output", "weights"), attentions=("eager",)),
    ]


SDPA: Any = {"attentions": ("sdpa",)}

RECIPES: tuple[Recipe, ...] = (
    *_mha("nn_mha", (X,)),
    *_mha("nn_mha_padding", (X, PADDING)),
    *_mha("nn_mha_causal", (X,), causal=True),
    Recipe("nn_mha_cross", CrossAttention, (X, SOURCE)),
    Recipe("nn_encoder", Encoder, (X,), **SDPA),
    Recipe("nn_encoder_padding", Encoder, (X, PADDING), **SDPA),
    Recipe("nn_encoder_causal", lambda kind: Encoder(kind, causal=True), (X,), **SDPA),
    Recipe("nn_decoder", Decoder, (X, SOURCE), **SDPA),
)
