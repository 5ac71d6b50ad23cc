"""Products of one input apart and as one: a gated MLP, queries, keys and values, and a Gelu that gates; launched and captured."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Bound, Race, Setting, model, numbers

ROWS = ((8, 512), (1, 512), (1, 1), (8, 1))
_SILU = "s = Sigmoid(g) m = Mul(g, s) n = Mul(m, u) y = MatMul(n, down)"
_ATTENTION = "y = com.microsoft.MultiHeadAttention<num_heads = {heads}>(q, k, v)"
FORMS: dict[str, dict[str, str]] = {
    "mlp": {
        "apart": f"u = MatMul(x, w0) g = MatMul(x, w1) {_SILU}",
        "one product, Split": f"p = MatMul(x, w) u, g = Split<axis = -1>(p, parts) {_SILU}",
    },
    "qkv": {
        "apart": f"q = MatMul(x, w0) k = MatMul(x, w1) v = MatMul(x, w2) {_ATTENTION}",
        "one product, Split": f"p = MatMul(x, w) q, k, v = Split<axis = -1>(p, parts) {_ATTENTION}",
    },
    "gelu": {
        "Split, Gelu, Mul": "p = MatMul(x, w) a = Add(p, bias) l, r = Split<axis = -1>(a, parts) h = Gelu(r) y = Mul(l, h)",
        "BiasSplitGelu": "p = MatMul(x, w) y = com.microsoft.BiasSplitGelu(p, bias)",
    },
}


def bound(part: str, form: str, size: tuple[int, int, int, int], setting: Setting, *, captured: bool) -> Bound:
    """One form for entries, positions, channels and the width of each product."""
    batch, length, channels, inner = size
    count = 3 if part == "qkv" else 2
    arrays: dict[str, Any] = {"w": numbers((channels, count * inner), setting.dtype, 0.05), "parts": np.asarray([inner] * count)}
    if form == "apart":
        arrays = {f"w{place}": arrays["w"][:, place * inner : (place + 1) * inner] for place in range(count)}
    if part == "mlp":
        arrays["down"] = numbers((inner, channels), setting.dtype, 0.05, 1)
    if part == "gelu":
        arrays["bias"] = numbers((count * inner,), setting.dtype, 1, 2)
    given = channels if part == "mlp" else inner
    ends = f"({setting.type}[{batch}, {length}, {channels}] x) => ({setting.type}[{batch}, {length}, {given}] y)"
    text = FORMS[part][form].format(heads=inner // 64)
    x = numbers((batch, length, channels), setting.dtype, 1, 3)
    return Bound(model(text, ends, arrays), setting, {"x": x}, captured=captured)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each part and size; steps are captured too."""
    channels, inner = (128, 384) if setting.quick else (2048, 5632)
    sizes = [("mlp", (*row, channels, inner)) for row in setting.some(ROWS)]
    sizes += [("qkv", (*row, channels, channels)) for row in setting.some(ROWS)]
    gelus = ((2, 4096, 320, 1280), (2, 1024, 640, 2560), (2, 256, 1280, 5120))
    sizes += [("gelu", size) for size in (gelus if setting.cuda else ())]
    for part, size in sizes:
        for captured in (False, True)[: 1 + (size[1] == 1 and setting.cuda)]:
            variants = {name: functools.partial(bound, part, name, size, setting, captured=captured) for name in FORMS[part]}
            yield Race(f"{part}, {'x'.join(map(str, size))}, {'captured' if captured else 'launched'}", variants)


BENCHMARK = Benchmark("Products of one input, apart and as one", races)
