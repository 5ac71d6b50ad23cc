"""Relative positions with a trained table, as T5 has it: a dense bias for one call, or a table that flex attention reads.

Which is faster decides whether trained biases go to flex attention. The table's gradient is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness import Benchmark, Race, Setting

_BUCKETS = 32
LENGTHS = ((512, 0), (2048, 0), (4096, 0), (4096, 256), (8192, 256), (64, 32))
"""Lengths, with the window that a row sees; 0: all."""


def bucket(distance: Tensor) -> Tensor:
    """The bucket of a distance between -16 and 15, the outer ones of all beyond."""
    return distance.clamp(-_BUCKETS // 2, _BUCKETS // 2 - 1) + _BUCKETS // 2


def dense(query: Tensor, key: Tensor, value: Tensor, table: Tensor, window: int) -> Tensor:
    """One call with all numbers, (1, n, s, t)."""
    place = torch.arange(query.shape[2], device=query.device)
    distance = place - place[:, None]
    bias = table[:, bucket(distance)].to(query.dtype)[None]
    if window:
        bias = bias.masked_fill((distance > 0) | (distance <= -window), -torch.inf)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def ruled(query: Tensor, key: Tensor, value: Tensor, table: Tensor, window: int) -> Tensor:
    """Flex attention that reads the table."""
    length, device = query.shape[2], str(query.device)
    near = lambda b, n, i, j: (j <= i) & (j > i - window)  # noqa: E731
    blocks = create_block_mask(near, None, None, length, length, device=device) if window else None
    scores = lambda score, b, n, i, j: score + table[n, bucket(j - i)]  # noqa: E731
    found: Any = flex_attention(query, key, value, score_mod=scores, block_mask=blocks)
    return found


class Pass:
    """A forward and a backward pass."""

    def __init__(self, call: Callable[..., Tensor], length: int, window: int, setting: Setting) -> None:
        generator = torch.Generator().manual_seed(0)
        batch, heads, size = (2, 4, 32) if setting.quick else (4, 12, 64)
        shapes = [(batch, heads, length, size)] * 3 + [(heads, _BUCKETS)]
        kinds = [torch.bfloat16 if setting.cuda else torch.float32] * 3 + [torch.float32]
        numbers = [torch.randn(shape, generator=generator) for shape in shapes]
        self.inputs = [item.to(setting.provider, kind).requires_grad_() for item, kind in zip(numbers, kinds, strict=True)]
        self.call, self.window = call, window

    def __call__(self) -> None:
        for item in self.inputs:
            item.grad = None
        self.call(*self.inputs, self.window).float().square().mean().backward()
        if self.inputs[0].is_cuda:
            torch.cuda.synchronize()

    def output(self) -> Any:
        """The gradient of the table."""
        assert self.inputs[3].grad is not None
        return self.inputs[3].grad.cpu().numpy()


def races(setting: Setting) -> Iterator[Race]:
    """A row for each length; flex attention has no gradient on a CPU, compiled."""
    ways: dict[str, Callable[..., Tensor]] = {"dense": dense, "flex": ruled}
    if setting.cuda:
        ways = {"dense": dense, "dense, compiled": torch.compile(dense), "flex": torch.compile(ruled)}
    for length, window in setting.some(LENGTHS):
        variants = {name: functools.partial(Pass, call, length, window, setting) for name, call in ways.items()}
        yield Race(f"{length}" + f", window {window}" * bool(window), variants)


BENCHMARK = Benchmark("A trained table of relative positions", races)
