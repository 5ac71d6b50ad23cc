"""Relative positions with a trained table: a dense bias for one call, or a table that flex attention reads and differentiates.

    PYTHONPATH=.:patterns:cli python benchmarks/flex_trained_bias.py OUT_FOLDER [--device cpu --small]

As T5 has it: buckets of distances, a number for each bucket and head. Milliseconds for a forward and a backward pass, and how far
the table's gradient is from that of the dense bias. Which is faster decides whether trained biases go to flex attention.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

_BUCKETS, _RUNS, _WARM = 32, 10, 3
_LENGTHS = ((512, 0), (2048, 0), (4096, 0), (4096, 256), (8192, 256))
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

    def scores(score: Tensor, b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[n, bucket(j - i)]

    def near(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - window)

    length, device = query.shape[2], str(query.device)
    blocks = create_block_mask(near, None, None, length, length, device=device) if window else None
    found: Any = flex_attention(query, key, value, score_mod=scores, block_mask=blocks)
    return found


def measure(call: Callable[..., Tensor], inputs: list[Tensor], window: int) -> tuple[float, Tensor]:
    """Milliseconds of a step, and the gradient of the table."""
    times: list[float] = []
    for _ in range(_WARM + _RUNS):
        for item in inputs:
            item.grad = None
        start = time.perf_counter()
        call(*inputs, window).float().square().mean().backward()
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    assert inputs[3].grad is not None
    return statistics.median(times[_WARM:]), inputs[3].grad.double()


def row(length: int, window: int, device: str, *, small: bool) -> dict[str, Any]:
    """All ways at one length."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    ways: dict[str, Callable[..., Tensor]] = {"dense": dense, "flex": ruled}
    if device != "cpu":  # flex attention has no gradient there, compiled
        ways = {"dense": dense, "dense, compiled": torch.compile(dense), "flex": torch.compile(ruled)}
    generator = torch.Generator().manual_seed(0)
    batch, heads, size = (2, 4, 32) if small else (4, 12, 64)
    numbers = [torch.randn(shape, generator=generator) for shape in [(batch, heads, length, size)] * 3 + [(heads, _BUCKETS)]]
    kinds = [dtype] * 3 + [torch.float32]
    found: dict[str, Any] = {"length": length, "window": window, "device": device, "torch": torch.__version__}
    expected: Tensor | None = None
    for name, call in ways.items():
        made = [item.to(device, kind).requires_grad_() for item, kind in zip(numbers, kinds, strict=True)]
        spent, gradient = tried(call, made, window)
        expected = gradient if expected is None else expected
        apart = None if gradient is None or expected is None else float((gradient - expected).norm() / expected.norm())
        found[name] = spent, apart
    return found


def tried(call: Callable[..., Tensor], inputs: list[Tensor], window: int) -> tuple[float | str, Tensor | None]:
    """What `measure` gives, or why it does not."""
    try:
        return measure(call, inputs, window)
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        return f"{type(error).__name__}: {str(error).strip()[:150]}", None


def main() -> None:
    """Measures each length, with and without a window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for length, window in ((64, 0), (256, 64)) if chosen.small else _LENGTHS:
        line = json.dumps(row(length, window, chosen.device, small=chosen.small))
        print(line, flush=True)
        with (chosen.folder / "flex_trained_bias.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
