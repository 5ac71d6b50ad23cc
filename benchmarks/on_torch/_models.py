"""Blocks of models as people write them, with attention spelled out, and by hand with the best call of PyTorch for each mask.

Masks: none (a vision transformer), a triangle in a buffer (GPT-2), a boolean padding mask beside a triangle and shared heads
(Llama), a window, documents packed into one row, a prefix that all see; words in the name of a mask add a soft cap or ALiBi.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WINDOW = 512
_PLAIN = frozenset(["none", "triangle", "computed triangle"])
"""Masks that need neither a rule nor a tensor."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it is fed."""

    name: str
    mask: str
    batch: int
    length: int
    width: int = 1024
    heads: int = 16
    kv_heads: int = 16
    layers: int = 4
    window: int = WINDOW
    document: int = 1024
    """The mean length of documents."""

    def inputs(self, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Hidden states, and what the mask is made of."""
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(self.batch, self.length, self.width, generator=generator)
        found = {"hidden": hidden.to(device, dtype)}
        lengths = torch.linspace(self.length // 2, self.length, self.batch).long()[:, None]
        if "padding" in self.mask:
            real = torch.arange(self.length) < lengths
            found["mask"] = (real.flip(1) if "left" in self.mask else real).to(device)
        if self.mask == "prefix":
            found["prefix"] = lengths.to(device)
        if self.mask == "documents":
            ends = torch.rand(self.batch, self.length, generator=generator) < 1 / self.document
            found["documents"] = ends.long().cumsum(1).to(device)
        return found


def cases(*, small: bool) -> list[Case]:
    """What is measured; small for trying it out on a CPU."""
    if small:
        shape: dict[str, Any] = {"width": 64, "heads": 4, "kv_heads": 4, "layers": 1}
        return [
            Case("vit 49", "none", 2, 49, **shape),
            Case("gpt2 128", "triangle", 2, 128, **shape),
            Case("llama 128", "padding", 2, 128, **{**shape, "kv_heads": 2}),
            Case("window 256", "window", 1, 256, window=32, **shape),
            Case("documents 256", "documents", 1, 256, document=64, **shape),
        ]
    return [
        Case("documents in 16384", "documents", 1, 16384, layers=1),
        Case("vit-l 196", "none", 64, 196),
        Case("gpt2-medium 4096", "triangle", 2, 4096),
        Case("vit-l 3136", "none", 4, 3136),
        Case("window 512 at 8192", "window", 1, 8192, layers=2),
        Case("llama 2048, padded", "padding", 4, 2048, width=2048, heads=32, kv_heads=8, layers=2),
        Case("gpt2-medium 1024", "triangle", 8, 1024),
    ]


class Block(torch.nn.Module):
    """A block with attention in front of its MLP."""

    def __init__(self, case: Case, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.case, self.attend = case, attend
        size = case.width // case.heads
        self.size = size
        self.before, self.between = torch.nn.LayerNorm(case.width), torch.nn.LayerNorm(case.width)
        self.query = torch.nn.Linear(case.width, case.heads * size)
        self.key = torch.nn.Linear(case.width, case.kv_heads * size)
        self.value = torch.nn.Linear(case.width, case.kv_heads * size)
        self.out = torch.nn.Linear(case.width, case.width)
        self.up, self.down = torch.nn.Linear(case.width, 4 * case.width), torch.nn.Linear(4 * case.width, case.width)
        if case.mask == "triangle":
            self.register_buffer("seen", torch.ones(case.length, case.length, dtype=torch.bool).tril(), persistent=False)
        if "alibi" in case.mask:
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, case.heads + 1.0)[:, None, None])

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        batch, length, _ = hidden.shape
        x = self.before(hidden)
        query, key, value = (
            layer(x).view(batch, length, -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        result = self.attend(self, query, key, value, **given)
        hidden = hidden + self.out(result.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))


class Model(torch.nn.Module):
    """Blocks, and a loss."""

    def __init__(self, case: Case, attend: Callable[..., torch.Tensor], prepare: Callable[..., dict[str, Any]] | None) -> None:
        super().__init__()
        self.case, self.prepare = case, prepare
        self.blocks = torch.nn.ModuleList([Block(case, attend) for _ in range(case.layers)])

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        if self.prepare is not None:
            given = self.prepare(self.case, hidden, **given)
        for block in self.blocks:
            hidden = block(hidden, **given)
        return (hidden if hidden.dtype == torch.float64 else hidden.float()).square().mean()


def spelled(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """Attention as it is written out."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (item.repeat_interleave(groups, 1) if groups > 1 else item for item in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(block.size)
    if "soft cap" in block.case.mask:
        scores = 5.0 * torch.tanh(scores / 5.0)
    if "alibi" in block.case.mask:
        place = torch.arange(length, device=scores.device)
        scores = scores + block.slopes * (place - place[:, None])
    if block.case.mask == "triangle":
        scores = scores.masked_fill(~block.seen[:length, :length], -math.inf)
    elif block.case.mask != "none":
        scores = scores.masked_fill(~given["seen"], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


def dense(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """One call with the whole mask."""
    mask = None if block.case.mask == "none" else block.seen if block.case.mask == "triangle" else given["seen"]
    groups = query.shape[1] // key.shape[1]
    key, value = (item.repeat_interleave(groups, 1) if groups > 1 else item for item in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def best(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """The best call that is known for the mask."""
    if block.case.mask in _PLAIN:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=block.case.mask != "none")
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, block_mask=given["blocks"], enable_gqa=query.shape[1] != key.shape[1])


def seen(case: Case, hidden: torch.Tensor, **given: Any) -> dict[str, Any]:
    """The whole mask, made once for all blocks."""
    if case.mask in {"none", "triangle"}:
        return {}
    place = torch.arange(hidden.shape[1], device=hidden.device)
    causal = place <= place[:, None]
    if "window" in case.mask:
        causal = causal & (place > place[:, None] - case.window)
    if "padding" in case.mask:
        causal = causal & given["mask"][:, None, None, :]
    if case.mask == "documents":
        documents = given["documents"]
        causal = causal & (documents[:, None, :, None] == documents[:, None, None, :])
    if case.mask == "prefix":
        causal = causal | (place < given["prefix"][..., None, None])
    return {"seen": causal}


def blocks(case: Case, hidden: torch.Tensor, **given: Any) -> dict[str, Any]:
    """The rule of the mask for flex attention, made once for all blocks."""
    if case.mask in _PLAIN:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask

    def rule(b: Any, n: Any, i: Any, j: Any) -> Any:
        if case.mask == "window":
            return (j <= i) & (j > i - case.window)
        if case.mask == "padding":
            return (j <= i) & given["mask"][b, j]
        return (j <= i) & (given["documents"][b, i] == given["documents"][b, j])

    batch = None if case.mask == "window" else hidden.shape[0]
    return {"blocks": create_block_mask(rule, batch, None, hidden.shape[1], hidden.shape[1], device=str(hidden.device))}


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def best_alone(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """The best call in a model that is not compiled itself."""
    if block.case.mask in _PLAIN:
        return best(block, query, key, value)
    from torch.nn.attention.flex_attention import flex_attention

    call = _compiled(flex_attention) if query.is_cuda else _with_a_dense_mask
    return call(query, key, value, block_mask=given["blocks"], enable_gqa=query.shape[1] != key.shape[1])


def _with_a_dense_mask(query: Any, key: Any, value: Any, *, block_mask: Any, enable_gqa: bool) -> Any:
    """Flex attention has no gradient on a CPU: small tries there have a dense mask."""
    i, j = (torch.arange(item.shape[2]) for item in (query, key))
    n = torch.zeros((), dtype=torch.long)
    rows = [block_mask.mask_mod(torch.tensor(b), n, i[:, None], j) for b in range(query.shape[0])]
    mask = torch.stack(rows)[:, None]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=enable_gqa)


def blocks_alone(case: Case, hidden: torch.Tensor, **given: Any) -> dict[str, Any]:
    """The rule of the mask in a model that is not compiled itself."""
    return (_compiled(blocks) if hidden.is_cuda else blocks)(case, hidden, **given)
