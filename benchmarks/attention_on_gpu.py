"""Attention on a GPU: spelled out, by the other tools, by us, and by torch; times, kernels and errors.

    python benchmarks/attention_on_gpu.py FOLDER OUT.json [--sizes 4x2048x32x128,8x512x12x64] [--arch sm90] [--seconds 400]

FOLDER holds what `attention_models.py` wrote. With ORT_ENABLE_CUDNN_FLASH_ATTENTION=0 in the environment, and `--arch sm80`,
kernels are chosen as on cards before Hopper. Times are milliseconds per attention, the median of runs that take turns; errors are
the largest of the first attention in two entries, against float64.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_models import KINDS, LAYERS, Attentions
from onnx_attnfuse.kernels.kernel_log import read_kernel_log

PATTERNS = {"padding": ("right", "left", "full"), "padding_causal": ("right", "left", "full")}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_CODES = {torch.float16: 10, torch.bfloat16: 16, torch.float32: 1}
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
OTHERS = {"unfused": "", "onnxscript": ".onnxscript"}
MOST_SCORES = 1 << 31
"""From this many on, what is spelled out may end the process."""
_ROUNDS, _MOST_SECONDS = 7, 1.0


class Data:
    """Inputs on the GPU."""

    def __init__(self, batch: int, length: int, width: int, dtype: torch.dtype, pattern: str) -> None:
        torch.manual_seed(0)
        self.tensors = [torch.randn(batch, length, width, device="cuda").to(dtype) for _ in range(3 * LAYERS)]
        self.mask = torch.ones(batch, length, dtype=torch.int64, device="cuda")
        for entry in range(1 if batch > 1 else 0, batch):
            if pattern == "right":
                self.mask[entry, length // 2 :] = 0
            elif pattern == "left":
                self.mask[entry, : length // 2] = 0

    def bound(self, session: Any) -> Any:
        """The inputs and outputs of a session, all on the GPU."""
        binding = session.io_binding()
        names = ["mask", *(f"{name}{layer}" for layer in range(LAYERS) for name in "qkv")]
        known = {item.name for item in session.get_inputs()}
        for name, tensor in zip(names, [self.mask, *self.tensors], strict=True):
            if name in known:
                code: Any = np.int64 if tensor.dtype == torch.int64 else _CODES[tensor.dtype]
                binding.bind_input(name, "cuda", 0, code, list(tensor.shape), tensor.data_ptr())
        self.results = [torch.empty_like(self.tensors[0]) for _ in range(LAYERS)]
        for item, result in zip(session.get_outputs(), self.results, strict=True):
            binding.bind_output(item.name, "cuda", 0, _CODES[result.dtype], list(result.shape), result.data_ptr())
        return binding


def session_of(path: pathlib.Path, *, telling: bool = False) -> Any:
    """A session on the GPU; one that is `telling` prints the kernels it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    os.environ["ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"] = "1" if telling else "0"
    providers = [("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"}), "CPUExecutionProvider"]
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


def kernels_of(path: pathlib.Path, data: Data) -> list[str]:
    """The kernels that run, as ONNX Runtime prints them."""
    session = session_of(path, telling=True)
    binding = data.bound(session)
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            session.run_with_iobinding(binding)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return sorted({run.kernel for run in read_kernel_log(file.read().decode(errors="ignore"))})


def fused(path: pathlib.Path, arch: str, size: tuple[int, ...], pattern: str) -> tuple[dict[str, str], dict[str, pathlib.Path]]:
    """The kernel that we forecast for each policy, and the models."""
    import onnx_attnfuse

    dim = {"b": size[0], "s": size[1]}
    policies: dict[str, dict[str, Any]] = {"ours": {"dim": dim}}
    if pattern:
        policies |= {"any size": {}, "exact": {"padding": "exact", "dim": dim}}
    if pattern in {"right", "full"}:
        policies["assumed"] = {"padding": "assume-right", "dim": dim}
    forecasts: dict[str, str] = {}
    paths: dict[str, pathlib.Path] = {}
    for label, choices in policies.items():
        target = pathlib.Path(tempfile.gettempdir()) / f"{path.stem}.{label}.onnx"
        result = onnx_attnfuse.optimize(path, ep="cuda", arch=arch, verify="none", **choices)
        result.save(target)
        paths[label] = target
        kernel = result.report.sites[0].kernel
        forecasts[label] = "unfused" if kernel is None else chosen_kernel(kernel, pattern)
    return forecasts, paths


def chosen_kernel(kernel: Any, pattern: str) -> str:
    """The first kernel of a forecast whose conditions a large batch of this kind fulfils."""
    chain = [(kernel.forecast, kernel.when), *((item.kernel, item.when) for item in kernel.otherwise)]
    unmet = {"right": ("there is no padding",), "full": (), "left": ("there is no padding", "on the right"), "": ()}[pattern]
    return next(found for found, when in chain if when is None or not any(words in when for words in unmet))


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds per attention of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    for turn in range(_ROUNDS + 2):
        for name, run in runs.items():
            torch.cuda.synchronize()
            before = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn > 1:
                times[name].append(time.perf_counter() - before)
        if turn > 3 and time.perf_counter() - start > _MOST_SECONDS:
            break
    return {name: round(1e3 * float(np.median(found)) / LAYERS, 4) for name, found in times.items()}


def torch_runs(kind: str, heads: int, dtype: torch.dtype, data: Data) -> dict[str, Callable[[], object]]:
    """Torch with each backend that takes the problem, and plainly."""
    module = Attentions(kind, heads, dtype).cuda().to(dtype).eval()
    runs: dict[str, Callable[[], object]] = {}
    huge = data.mask.numel() * data.mask.shape[1] * heads >= MOST_SCORES
    for name, backend in _BACKENDS.items():
        if name == "math" and huge:
            continue

        def run(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend), torch.inference_mode():
                return module(data.mask, *data.tensors)

        try:
            run()
        except RuntimeError:
            continue
        runs[f"torch {name}"] = run
    return runs


def cell(name: str, size: tuple[int, ...], pattern: str, folder: pathlib.Path, arch: str) -> dict[str, Any]:
    """Everything about one model at one size."""
    kind, _, dtype_name = name.split("-")
    batch, length, heads, head = size
    dtype = DTYPES[dtype_name]
    data = Data(batch, length, heads * head, dtype, pattern)
    found: dict[str, Any] = {"name": name, "size": list(size), "pattern": pattern, "ms": {}, "error": {}, "failed": {}}
    runs: dict[str, Callable[[], object]] = {}
    kept: list[Any] = []
    paths = {label: folder / f"{name}{suffix}.onnx" for label, suffix in OTHERS.items()}
    found["expected"], ours = fused(paths["unfused"], arch, size, pattern)
    for label, path in (paths | ours).items():
        if not path.exists() or (label == "unfused" and batch * heads * length * length >= MOST_SCORES):
            continue
        try:
            if label in ours:
                found.setdefault("ran", {})[label] = kernels_of(path, data)
            session = session_of(path)
            binding = data.bound(session)
            session.run_with_iobinding(binding)
            found["error"][label] = difference(kind, heads, dtype, data)
            kept.append((session, binding, data.results))
            runs[label] = lambda session=session, binding=binding: session.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            found["failed"][label] = " ".join(str(error).split())[:120]
    runs |= torch_runs(kind, heads, dtype, data)
    found["ms"] = timed(runs)
    return found


def difference(kind: str, heads: int, dtype: torch.dtype, data: Data) -> float:
    """The largest error of the first result in a few heads and entries, rows without a key left out."""
    module = Attentions(kind, heads, dtype).cuda().to(dtype).eval()
    entries = slice(0, 2)
    if data.mask.shape[1] > 8192:
        return -1.0
    torch.manual_seed(0)
    operands = [tensor[entries].double() for tensor in data.tensors[:3]]
    with torch.inference_mode():
        from benchmarks.attention_models import bias_of

        bias = None if kind == "t5" else bias_of(kind, data.mask[entries], data.mask.shape[1], module, torch.float32)
        if kind == "t5":
            return -1.0
        if bias is not None and bias.dtype != torch.bool:
            bias = bias.double()
        wanted = module.one(bias, *operands)
    alive = ~wanted.isnan()
    return float((data.results[0][entries].double() - wanted)[alive].abs().max())


def main() -> None:
    """Measures until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--sizes", default="4x2048x32x128,8x512x12x64")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--seconds", type=float, default=400)
    chosen = parser.parse_args()
    cells: list[dict[str, Any]] = []
    start = time.perf_counter()
    for dtype in chosen.dtypes.split(","):
        for text in chosen.sizes.split(","):
            size = tuple(map(int, text.split("x")))
            for kind in chosen.kinds.split(","):
                name = f"{kind}-{size[2]}x{size[3]}-{dtype}"
                for pattern in PATTERNS.get(kind, ("",)):
                    if not (chosen.folder / f"{name}.onnx").exists() or time.perf_counter() - start > chosen.seconds:
                        continue
                    try:
                        cells.append(cell(name, size, pattern, chosen.folder, chosen.arch))
                    except Exception as error:  # noqa: BLE001 - such as too little memory for one of them
                        cells.append({"name": name, "size": list(size), "pattern": pattern, "broken": str(error)[:200]})
                    torch.cuda.empty_cache()
                    print(json.dumps(cells[-1]), flush=True)
            chosen.out.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
