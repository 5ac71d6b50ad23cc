"""Padding as a bias, as lengths, as lengths with offsets, and removed, beside torch on padded and nested tensors.

Lengths are spread evenly so that half of all tokens is no padding, one entry being full; differences are at tokens that are no
padding. The models are those of `python -m benchmarks.exports encoder`.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import onnx_attnfuse
from benchmarks import exports, harness
from benchmarks.harness import Benchmark, Bound, Race, Setting

FORMS: Mapping[str, Mapping[str, Any]] = {
    "bias": {"target": "MultiHeadAttention", "padding": "exact"},
    "lengths": {"target": "MultiHeadAttention", "padding": "assume-right", "arch": "sm90"},
    "ranges": {"target": "MultiHeadAttention", "padding": "assume-right", "arch": "sm80"},
    "packed": {"target": "packed", "padding": "assume-right"},
    "guarded": {"target": "packed", "padding": "guarded"},
}
"""What gives each form; on cards before Hopper lengths with offsets, (3b+2), are chosen."""
SIZES = ((8, 512, 12, 64), (32, 128, 12, 64), (8, 1024, 16, 64), (4, 2048, 16, 64), (3, 32, 2, 16))
_KEPT = 0.5


def lengths_of(batch: int, length: int) -> list[int]:
    """One full, the others spread evenly."""
    mean = max(1.0, (batch * _KEPT - 1) / (batch - 1) * length)
    spread = min(mean - 1, length - mean)
    return [length, *(round(float(item)) for item in np.linspace(mean - spread, mean + spread, batch - 1))]


class Padded(Bound):
    """A model whose result is known where nothing is padding."""

    words = ""


def ours(path: pathlib.Path, form: str, feeds: Mapping[str, Any], setting: Setting) -> Bound:
    """A form, with the kernels that ran."""
    result = onnx_attnfuse.optimize(path, **{"ep": "cuda", "arch": "sm90", "verify": "none", **FORMS[form]})
    target = path.with_suffix(f".{form}.onnx")
    result.save(target)
    ran = harness.kernels(lambda: Padded(target, setting, feeds))
    bound = Padded(target, setting, feeds)
    bound.words = "/".join(ran)
    return bound


def by_torch(module: torch.nn.Module, *inputs: Any, setting: Setting) -> Callable[[], object]:
    """Torch, by the kernels that nested tensors take too."""

    def run() -> None:
        with torch.inference_mode(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            module(*inputs)
        if setting.cuda:
            torch.cuda.synchronize()

    return run


def race(kind: str, dtype: str, size: tuple[int, ...], setting: Setting) -> Race:
    """A row."""
    batch, length, heads, head = size
    torch.manual_seed(0)
    kept = torch.tensor(lengths_of(batch, length))
    x = torch.randn(batch, length, heads * head).to(setting.provider, getattr(torch, dtype))
    mask = (torch.arange(length) < kept[:, None]).long().to(setting.provider)
    module = exports.Encoder(kind, heads, head).eval().to(setting.provider)
    with torch.inference_mode():
        truth = module(x.float(), mask).cpu().numpy()
    truth[mask.cpu().numpy() == 0] = np.nan
    path = exports.encoder(setting.folder, kind, heads, head, dtype)
    feeds = {"x": x, "mask": mask}
    variants: dict[str, Callable[[], Any]] = {"unfused": lambda: Padded(path, setting, feeds)}
    variants |= {form: functools.partial(ours, path, form, feeds, setting) for form in FORMS}
    module = module.to(getattr(torch, dtype))
    entries = [row[:count] for row, count in zip(x, kept.tolist(), strict=True)]
    nested = torch.nested.nested_tensor(entries, layout=torch.jagged)
    variants["torch padded"] = lambda: by_torch(module, x, mask, setting=setting)
    variants["torch nested"] = lambda: by_torch(module, nested, setting=setting)
    return Race(f"{kind}, {dtype}, {'x'.join(map(str, size))}", variants, truth, each=exports.LAYERS)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each type, size and kind of layer."""
    exports.quiet()
    for dtype in ("float16", "float32") if setting.cuda else ("float32",):
        for size in setting.sizes(SIZES):
            for kind in ("attention", "encoder"):
                yield race(kind, dtype, size, setting)


BENCHMARK = Benchmark("Padding, handed over or removed", races)
