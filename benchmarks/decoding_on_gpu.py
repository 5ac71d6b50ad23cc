"""Prefill and decode of a decoder's attention on a GPU: spelled out, by onnxscript, by each operator of ours, and by torch.

    python benchmarks/decoding_on_gpu.py FOLDER OUT.json [--cells 1x1x512,8x512x0] [--dtypes float16,bfloat16] [--seconds 300]

FOLDER holds what `decoder_models.py` wrote; a cell is batch, new positions and cached ones. Times are milliseconds per attention
with its rotary embedding and cache, the median of runs that take turns; errors are the largest against what is spelled out;
memory is what one run takes beyond inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import onnx_attnfuse
from benchmarks.attention_on_gpu import DTYPES, kernels_of, session_of, timed
from benchmarks.decoder_models import LAYERS, NAMES, Decoder, example, half_turned

CELLS = "1x1x512,8x1x512,32x1x512,1x1x8192,8x1x8192,32x1x8192,1x512x0,8x512x0,32x512x0,1x8192x0"
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "any size": {},
    "no padding": {"padding": "assume-none"},
    "MultiHeadAttention": {"target": "MultiHeadAttention", "padding": "exact"},
    "onnx.Attention": {"target": "onnx.Attention", "padding": "exact"},
    "GroupQueryAttention": {"target": "GroupQueryAttention", "padding": "assume-none"},
    "rotary outside": {"target": "GroupQueryAttention", "padding": "assume-none"},
}
_CODES = {torch.float16: 10, torch.bfloat16: 16, torch.float32: 1, torch.int64: np.int64}
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Data:
    """Inputs and outputs on the GPU."""

    def __init__(self, shape: tuple[int, int, int], size: tuple[int, int, int], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.shape, self.size = shape, size
        self.mask, *self.tensors = (item.cuda() for item in example(*shape, size, dtype))
        batch, new, past = size
        heads, kv_heads, head_size = shape
        one = [(batch, new, heads * head_size), *[(batch, kv_heads, past + new, head_size)] * 2]
        self.results = [torch.empty(item, dtype=dtype, device="cuda") for _ in range(LAYERS) for item in one]

    def bound(self, session: Any) -> Any:
        """The inputs and outputs of a session, all on the GPU."""
        binding = session.io_binding()
        names = ["mask", *(f"{name}{layer}" for layer in range(LAYERS) for name in NAMES)]
        known = {item.name for item in session.get_inputs()}
        for name, tensor in zip(names, [self.mask, *self.tensors], strict=True):
            if name in known:
                binding.bind_input(name, "cuda", 0, _CODES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        for item, result in zip(session.get_outputs(), self.results, strict=True):
            binding.bind_output(item.name, "cuda", 0, _CODES[result.dtype], list(result.shape), result.data_ptr())
        return binding


def fused(path: pathlib.Path, label: str, size: tuple[int, int, int]) -> tuple[str, pathlib.Path]:
    """The operator and kernel that we forecast, and the model."""
    choices = OURS[label]
    if label in {"ours", "no padding"}:
        choices = {**choices, "dim": dict(zip("bsp", (max(1, number) for number in size), strict=True))}
    target = pathlib.Path(tempfile.gettempdir()) / f"{path.stem}.{label.replace(' ', '_')}.onnx"
    absorbs = "onnx_attnfuse.targets.group_query_attention.absorbs_rotary"
    with mock.patch(absorbs, return_value=False) if label == "rotary outside" else mock.MagicMock():
        result = onnx_attnfuse.optimize(path, ep="cuda", arch="sm90", verify="none", **choices)
    result.save(target)
    site = result.report.sites[0]
    return f"{site.mask_form}: {site.kernel.forecast if site.kernel else 'unfused'}", target


def torch_runs(data: Data) -> dict[str, Callable[[], object]]:
    """Torch as one would write it for this size: no mask where none is needed, heads grouped, each backend that takes it."""
    module = Decoder(*data.shape).cuda().to(data.tensors[0].dtype)
    _, new, past = data.size

    def one(backend: SDPBackend) -> None:
        places = past + torch.arange(new, device="cuda")
        angles = places[:, None].float() * module.get_buffer("frequencies")
        angles = torch.cat([angles, angles], -1)
        cos, sin = (values.to(data.tensors[0].dtype) for values in (angles.cos(), angles.sin()))
        for at in range(0, len(data.tensors), len(NAMES)):
            query, key, value = (
                item.unflatten(-1, (count, -1)).transpose(1, 2)
                for item, count in zip(data.tensors[at : at + 3], (module.heads, module.kv_heads, module.kv_heads), strict=True)
            )
            query, key = (item * cos + half_turned(item) * sin for item in (query, key))
            key, value = torch.cat([data.tensors[at + 3], key], 2), torch.cat([data.tensors[at + 4], value], 2)
            with sdpa_kernel(backend), torch.inference_mode():
                functional.scaled_dot_product_attention(query, key, value, is_causal=past == 0, enable_gqa=True)

    runs: dict[str, Callable[[], object]] = {}
    for name, backend in _BACKENDS.items():
        try:
            one(backend)
        except RuntimeError:
            continue
        runs[f"torch {name}"] = lambda backend=backend: one(backend)
    return runs


def cell(path: pathlib.Path, shape: tuple[int, int, int], size: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Everything about one model at one size."""
    data = Data(shape, size, dtype)
    found: dict[str, Any] = {"name": path.stem, "size": list(size)}
    found |= {name: {} for name in ("ms", "error", "failed", "ran", "forecast", "MB")}
    runs: dict[str, Callable[[], object]] = {}
    kept: list[Any] = []
    wanted: list[torch.Tensor] = []
    paths = {"unfused": path, "onnxscript": path.with_suffix(".onnxscript.onnx")}
    for label in [*paths, *OURS]:
        try:
            if label in OURS:
                found["forecast"][label], paths[label] = fused(path, label, size)
            found["ran"][label] = kernels_of(paths[label], data)
            free = torch.cuda.mem_get_info()[0]
            session = session_of(paths[label])
            binding = data.bound(session)
            session.run_with_iobinding(binding)
            found["MB"][label] = round((free - torch.cuda.mem_get_info()[0]) / 1e6)
            results = [item[:2].float() for item in data.results[:3]]
            wanted = wanted or results
            found["error"][label] = max(float((new - old).abs().max()) for new, old in zip(results, wanted, strict=True))
            kept.append((session, binding))
            runs[label] = lambda session=session, binding=binding: session.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001, PERF203 - a failure is a result
            found["failed"][label] = " ".join(str(error).split())[:200]
    runs |= torch_runs(data)
    found["ms"] = timed(runs)
    return found


def main() -> None:
    """Measures until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--heads", default="32x8x128")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--seconds", type=float, default=300)
    chosen = parser.parse_args()
    heads, kv_heads, head_size = map(int, chosen.heads.split("x"))
    cells: list[dict[str, Any]] = []
    start = time.perf_counter()
    for dtype in chosen.dtypes.split(","):
        for text in chosen.cells.split(","):
            batch, new, past = map(int, text.split("x"))
            if time.perf_counter() - start > chosen.seconds:
                continue
            path = chosen.folder / f"decoder-{chosen.heads}-{dtype}.onnx"
            try:
                cells.append(cell(path, (heads, kv_heads, head_size), (batch, new, past), DTYPES[dtype]))
            except Exception as error:  # noqa: BLE001 - such as too little memory for one of them
                cells.append({"name": path.stem, "size": [batch, new, past], "broken": str(error)[:200]})
            torch.cuda.empty_cache()
            print(json.dumps(cells[-1]), flush=True)
            chosen.out.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
