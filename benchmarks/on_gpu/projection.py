"""Attention with its projections, in the four forms that ONNX Runtime has operators for; half of all keys are padding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Bound, Race, Setting, model, numbers

SIZES = (
    *((1, 128, 12, 64), (8, 128, 12, 64), (8, 512, 12, 64), (32, 197, 16, 64), (2, 3137, 16, 64), (1, 1024, 16, 64)),
    *((4, 2048, 32, 128), (2, 16, 2, 64)),
)
MASKS = ("none", "causal", "lengths", "bias")
_LAYERS = 4
_INNER = "com.microsoft.MultiHeadAttention<{same}>"
_THREE = " ".join(f"{part}p{{i}} = MatMul(x{{i}}, w{at})" for at, part in enumerate("qkv"))
FORMS = {
    "three": f"{_THREE} {' '.join(f'{p}{{i}} = Add({p}p{{i}}, b{at})' for at, p in enumerate('qkv'))} "
    f'x{{j}} = {_INNER}(q{{i}}, k{{i}}, v{{i}}, "", {{lengths}}, {{bias}})',
    "biased": f"{_THREE} x{{j}} = {_INNER}(qp{{i}}, kp{{i}}, vp{{i}}, b, {{lengths}}, {{bias}})",
    "packed": "p{i} = MatMul(x{i}, w) a{i} = Add(p{i}, b) q{i}, k{i}, v{i} = Split<axis = -1, num_outputs = 3>(a{i}) "
    f'x{{j}} = {_INNER}(q{{i}}, k{{i}}, v{{i}}, "", {{lengths}}, {{bias}})',
    "attention": 'x{j} = com.microsoft.Attention<{same}>(x{i}, w, b, {lengths}, "", {bias})',
}


def bound(form: str, mask: str, size: tuple[int, ...], setting: Setting) -> Bound:
    """Layers in a row, all with the same weights."""
    batch, length, heads, head = size
    width = heads * head
    arrays: dict[str, Any] = {
        "w": numbers((width, 3 * width), setting.dtype, width**-0.5),
        "b": numbers((3 * width,), setting.dtype),
    }
    for at in range(3):
        part = slice(at * width, (at + 1) * width)
        arrays |= {f"w{at}": arrays["w"][:, part], f"b{at}": arrays["b"][part]}
    kept = np.asarray([length] + [max(1, length // 2)] * (batch - 1), np.int32)
    feeds: dict[str, Any] = {"x0": numbers((batch, length, width), setting.dtype, 1, 2)}
    inputs = f"{setting.type}[{batch}, {length}, {width}] x0"
    if mask == "lengths":
        feeds["mask"], inputs = kept, f"{inputs}, int32[{batch}] mask"
    if mask == "bias":
        padded = np.arange(length)[None, None, None] >= kept[:, None, None, None]
        bias = np.where(padded, np.float32(-6e4), np.float32(0)).astype(setting.dtype)
        feeds["mask"] = np.ascontiguousarray(np.broadcast_to(bias, (batch, 1, length, length)))
        inputs = f"{inputs}, {setting.type}[{batch}, 1, {length}, {length}] mask"
    words = {name: "mask" if mask == name else '""' for name in ("lengths", "bias")}
    same = f"num_heads = {heads}, scale = {head**-0.5}, unidirectional = {int(mask == 'causal')}"
    lines = " ".join(FORMS[form].format(i=layer, j=layer + 1, same=same, **words) for layer in range(_LAYERS))
    used = {name: array for name, array in arrays.items() if f"{name})" in lines or f"{name}," in lines}
    ends = f"({inputs}) => ({setting.type}[{batch}, {length}, {width}] x{_LAYERS})"
    return Bound(model(lines, ends, used), setting, feeds)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each size and mask."""
    for size in setting.sizes(SIZES):
        for mask in MASKS:
            variants = {form: functools.partial(bound, form, mask, size, setting) for form in FORMS}
            yield Race(f"{'x'.join(map(str, size))}, {mask}", variants, each=_LAYERS)


BENCHMARK = Benchmark("Attention with its projections", races)
