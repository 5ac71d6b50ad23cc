"""Attention as people write it by hand: one small module per habit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.recipe import Input, Recipe

WIDTH = 32
HEADS = 4
HEAD = WIDTH // HEADS
X = Input("x", ("batch", "seq", WIDTH))
MASK = Input("mask", ("batch", "seq"), "mask")


class Handwritten(nn.Module):
    """Projections and a residual around a function that attends."""

    def __init__(self, attend: Callable[..., Tensor], *, grouped: bool = False) -> None:
        """Builds the projections.

        Args:
            attend: Takes query, key and value as ``(batch, seq, width)``, and the mask if any.
            grouped: Whether keys and values have half as many heads.
        """
        super().__init__()
        self.attend = attend
        shared = WIDTH // 2 if grouped else WIDTH
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, shared)
        self.value = nn.Linear(WIDTH, shared)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends from `x` to itself."""
        rest = () if mask is None else (mask,)
        return x + self.out(self.attend(self.query(x), self.key(x), self.value(x), *rest))


class Packed(nn.Module):
    """One linear layer for query, key and value, cut apart after a reshape (as in timm)."""

    def __init__(self, *, bias: bool) -> None:
        """Builds the projections."""
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attends from `x` to itself."""
        batch, seq, _ = x.shape
        packed = self.qkv(x).reshape(batch, seq, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        q, k, v = packed.unbind(0)
        weights = ((q * HEAD**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, seq, WIDTH))


class Chunked(nn.Module):
    """One linear layer for query, key and value, cut with chunk (as in GPT-2)."""

    def __init__(self) -> None:
        """Builds the projections."""
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attends from `x` to itself."""
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        return x + self.out(join((q @ k.transpose(-1, -2) / math.sqrt(HEAD)).softmax(-1) @ v))


def split(x: Tensor) -> Tensor:
    """Turns ``(batch, seq, width)`` into ``(batch, heads, seq, head)``."""
    return x.view(x.shape[0], x.shape[1], -1, HEAD).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """Turns ``(batch, heads, seq, head)`` into ``(batch, seq, width)``."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Einstein sums on ``(batch, seq, heads, head)``, no transpose anywhere."""
    q, k, v = (x.reshape(x.shape[0], x.shape[1], HEADS, HEAD) for x in (q, k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD)
    mixed = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v)
    return mixed.reshape(mixed.shape[0], mixed.shape[1], WIDTH)


def scale_on_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale multiplies the query, before the heads are split."""
    q, k, v = split(q * HEAD**-0.5), split(k), split(v)
    return join((q @ k.transpose(-2, -1)).softmax(-1) @ v)


def scale_on_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The root of the scale multiplies query and key, and the logits stay as they are."""
    root = HEAD**-0.25
    q, k, v = split(q) * root, split(k) * root, split(v)
    return join((q @ k.transpose(-2, -1)).softmax(-1) @ v)


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Logits by ``baddbmm`` into an empty tensor, with the scale as its alpha."""
    q, k, v = (split(x).flatten(0, 1) for x in (q, k, v))
    empty = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    logits = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=HEAD**-0.5)
    mixed = torch.bmm(logits.softmax(-1), v)
    return join(mixed.view(-1, HEADS, mixed.shape[1], HEAD))


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads folded into the batch, three-dimensional products (as in fairseq)."""
    q, k, v = (split(x).reshape(-1, x.shape[1], HEAD) for x in (q * HEAD**-0.5, k, v))
    mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
    return join(mixed.view(-1, HEADS, mixed.shape[1], HEAD))


def masked_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal by ``masked_fill`` with minus infinity above a triangle (as in minGPT)."""
    logits = split(q) @ split(k).transpose(-2, -1) / math.sqrt(HEAD)
    length = q.shape[1]
    allowed = torch.tril(torch.ones(length, length, dtype=torch.bool, device=q.device))
    return join(logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ split(v))


def added_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Padding by adding a large negative number (as in the first BERT)."""
    logits = split(q) @ split(k).transpose(-1, -2) / math.sqrt(HEAD)
    penalty = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return join((logits + penalty).softmax(-1) @ split(v))


def filled_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Padding by ``where`` with the least float, and zeros after the softmax."""
    logits = split(q) @ split(k).transpose(-1, -2) * HEAD**-0.5
    keep = mask[:, None, None, :].bool()
    weights = torch.where(keep, logits, torch.finfo(q.dtype).min).softmax(-1)
    return join(weights.masked_fill(~keep, 0.0) @ split(v))


def single_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head as wide as the model: no reshape at all."""
    return (q @ k.transpose(-2, -1) / math.sqrt(WIDTH)).softmax(-1) @ v


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No scale anywhere (as in T5)."""
    return join((split(q) @ split(k).transpose(-2, -1)).softmax(-1) @ split(v))


def stable_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax spelled out: subtract the largest, exponentiate, divide by the sum."""
    logits = split(q) @ split(k).transpose(-2, -1) * HEAD**-0.5
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    return join(powers / powers.sum(-1, keepdim=True) @ split(v))


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused function of torch, causal by its flag, with a scale of its own."""
    attend = functional.scaled_dot_product_attention
    return join(attend(split(q), split(k), split(v), is_causal=True, scale=0.5))


def sdpa_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused function of torch with fewer heads in key and value."""
    attend = functional.scaled_dot_product_attention
    return join(attend(split(q), split(k), split(v), enable_gqa=True))


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fewer heads in key and value, repeated by hand."""
    q, k, v = split(q), split(k), split(v)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    return join((q @ k.transpose(-2, -1) * HEAD**-0.5).softmax(-1) @ v)


EAGER: tuple[str, ...] = ("eager",)
SDPA: tuple[str, ...] = ("sdpa",)
#: Name, function, further inputs.
EAGER_VARIANTS: tuple[tuple[str, Callable[..., Tensor], tuple[Input, ...]], ...] = (
    ("einsum", einsum, ()),
    ("scale_on_query", scale_on_query, ()),
    ("scale_on_both", scale_on_both, ()),
    ("baddbmm", baddbmm, ()),
    ("folded", folded, ()),
    ("masked_triangle", masked_triangle, ()),
    ("added_mask", added_mask, (MASK,)),
    ("filled_mask", filled_mask, (MASK,)),
    ("single_head", single_head, ()),
    ("unscaled", unscaled, ()),
    ("stable_softmax", stable_softmax, ()),
)


def _variant(name: str, attend: Callable[..., Tensor], rest: tuple[Input, ...]) -> Recipe:
    return Recipe(f"hw_{name}", lambda _: Handwritten(attend), (X, *rest), attentions=EAGER)


RECIPES: tuple[Recipe, ...] = (
    *(_variant(*variant) for variant in EAGER_VARIANTS),
    Recipe("hw_packed", lambda _: Packed(bias=True), (X,), attentions=EAGER),
    Recipe("hw_packed_no_bias", lambda _: Packed(bias=False), (X,), attentions=EAGER),
    Recipe("hw_chunked", lambda _: Chunked(), (X,), attentions=EAGER),
    Recipe(
        "hw_repeated_heads",
        lambda _: Handwritten(repeated_heads, grouped=True),
        (X,),
        attentions=EAGER,
    ),
    Recipe("hw_sdpa_causal", lambda _: Handwritten(sdpa_causal), (X,), attentions=SDPA),
    Recipe(
        "hw_sdpa_grouped",
        lambda _: Handwritten(sdpa_grouped, grouped=True),
        (X,),
        attentions=SDPA,
    ),
)
