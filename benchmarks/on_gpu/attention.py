"""Attention by its mask: spelled out, by onnxscript, by us under each policy for padding, and by each backend of torch.

The models are those of `python -m benchmarks.exports attention`. With ORT_ENABLE_CUDNN_FLASH_ATTENTION=0 in the environment, and
`--arch sm80`, kernels are chosen as on cards before Hopper. A cell of ours ends with the kernels that ran, and the forecast
if it was another one.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import onnx_attnfuse
from benchmarks import exports
from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.sessions import Bound
from onnx_attnfuse.bench.confirm_kernels import SWITCH, read_kernel_log

SIZES = ((4, 2048, 32, 128), (8, 512, 12, 64), (2, 64, 2, 16))
PATTERNS = {"padding": ("right", "left", "full"), "padding_causal": ("right", "left", "full")}
MOST_SCORES = 1 << 31
"""From this many on, what is spelled out may end the process."""
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_ENTRIES = 2
"""That are compared with float64."""


def inputs(size: tuple[int, ...], dtype: torch.dtype, pattern: str, setting: Setting) -> dict[str, torch.Tensor]:
    """Tensors on the device; half of every entry but the first is padding."""
    batch, length, heads, head = size
    torch.manual_seed(0)
    names = [f"{name}{layer}" for layer in range(exports.LAYERS) for name in "qkv"]
    found = {name: torch.randn(batch, length, heads * head).to(setting.provider, dtype) for name in names}
    mask = torch.ones(batch, length, dtype=torch.int64)
    if pattern in {"right", "left"}:
        mask[batch > 1 :, slice(length // 2, None) if pattern == "right" else slice(length // 2)] = 0
    return {"mask": mask.to(setting.provider), **found}


class Compared(Bound):
    """A model of which some entries of the first result are compared."""

    words = ""

    def output(self) -> Any:
        found = super().output()
        return None if found is None else found[:_ENTRIES]


def policies(size: tuple[int, ...], pattern: str) -> dict[str, dict[str, Any]]:
    """Options of ours, by their column."""
    dim = {"b": size[0], "s": size[1]}
    found: dict[str, dict[str, Any]] = {"ours": {"dim": dim}}
    if pattern:
        found |= {"any size": {}, "exact": {"padding": "exact", "dim": dim}}
    return found | ({"assumed": {"padding": "assume-right", "dim": dim}} if pattern in {"right", "full"} else {})


def ours(path: pathlib.Path, options: Mapping[str, Any], feeds: Mapping[str, Any], pattern: str, setting: Setting) -> Bound:
    """The model as we write it, with the kernels that were forecast and those that ran."""
    arch = {"arch": setting.arch} if setting.cuda else {}
    result = onnx_attnfuse.optimize(path, ep=setting.provider, verify="none", **arch, **options)
    target = path.with_suffix(".ours.onnx")
    result.save(target)
    kernel = result.report.sites[0].kernel
    forecast = "unfused" if kernel is None else first_kernel(kernel, pattern)
    ran = kernels(lambda: Compared(target, setting, feeds))
    bound = Compared(target, setting, feeds)
    bound.words = "/".join(ran) + ("" if ran == [forecast] or not ran else f", forecast {forecast}")
    return bound


def kernels(make: Callable[[], Bound]) -> list[str]:
    """The kernels of attention that a model runs, as ONNX Runtime prints them."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as log, mock.patch.dict(os.environ, SWITCH):
        os.dup2(log.fileno(), 1)
        try:
            make()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        log.seek(0)
        return sorted({run.kernel for run in read_kernel_log(log.read().decode(errors="ignore"))})


def first_kernel(kernel: Any, pattern: str) -> str:
    """The first kernel of a forecast whose conditions a large batch of this kind fulfils."""
    chain = [(kernel.forecast, kernel.when), *((item.kernel, item.when) for item in kernel.otherwise)]
    unmet = {"right": ("there is no padding",), "left": ("there is no padding", "on the right")}.get(pattern, ())
    return next(found for found, when in chain if when is None or not any(words in when for words in unmet))


def by_torch(
    module: torch.nn.Module, feeds: Mapping[str, torch.Tensor], backend: SDPBackend, setting: Setting
) -> Callable[[], object]:
    """Torch with a backend that takes the problem."""
    tensors = tuple(feeds.values())

    def run() -> None:
        with sdpa_kernel(backend), torch.inference_mode():
            module(*tensors)
        if setting.cuda:
            torch.cuda.synchronize()

    return run


def truth(module: exports.Attentions, feeds: Mapping[str, torch.Tensor]) -> Any:
    """The first result of some entries in float64; NaN in rows without a key, None for tables and long rows."""
    if module.kind == "t5" or feeds["mask"].shape[1] > 8192:
        return None
    bias = exports.bias_of(module.kind, feeds["mask"][:_ENTRIES], module, torch.float32)
    bias = bias if bias is None or bias.dtype == torch.bool else bias.double()
    with torch.no_grad():
        found = module.one(bias, *(feeds[name][:_ENTRIES].double() for name in ("q0", "k0", "v0")))
    if bias is not None and bias.dtype == torch.bool:
        found[~bias[:, 0].any(-1).expand(found.shape[:2])] = torch.nan
    return found.cpu().numpy()


def race(kind: str, dtype: str, size: tuple[int, ...], pattern: str, setting: Setting) -> Race:
    """A row."""
    batch, length, heads, head = size
    path = exports.attention(setting.folder, kind, heads, head, dtype)
    feeds = inputs(size, getattr(torch, dtype), pattern, setting)
    module = exports.Attentions(kind, heads, getattr(torch, dtype)).to(setting.provider, getattr(torch, dtype)).eval()
    huge = batch * heads * length * length >= MOST_SCORES
    variants: dict[str, Callable[[], Any]] = {} if huge else {"unfused": lambda: Compared(path, setting, feeds)}
    variants["onnxscript"] = lambda: Compared(path.with_suffix(".onnxscript.onnx"), setting, feeds)
    for name, options in policies(size, pattern).items():
        variants[name] = functools.partial(ours, path, options, feeds, pattern, setting)
    for name, backend in _BACKENDS.items():
        if setting.cuda and not (huge and name == "math"):
            variants[f"torch {name}"] = functools.partial(by_torch, module, feeds, backend, setting)
    label = f"{kind.replace('_', ' + ')}{f', {pattern}' * bool(pattern)}, {dtype}, {'x'.join(map(str, size))}"
    return Race(label, variants, truth(module, feeds), each=exports.LAYERS)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each type, size, mask and kind of padding."""
    for dtype in ("float16", "bfloat16", "float32") if setting.cuda else ("float32",):
        for size in setting.sizes_or(SIZES):
            for kind in exports.KINDS:
                for pattern in PATTERNS.get(kind, ("",)):
                    yield race(kind, dtype, size, pattern, setting)


BENCHMARK = Benchmark("Attention by its mask", races)
