"""Padding on a GPU: as a bias, as lengths, with offsets, and removed; times, kernels and errors, beside torch.

    python benchmarks/packing_models.py FOLDER
    python benchmarks/packing_on_gpu.py FOLDER OUT.json [--sizes 8x512x12x64,4x2048x16x64] [--kept 0.5]

FOLDER holds what `packing_models.py` wrote. Lengths are spread evenly so that `--kept` of all tokens is no padding, one
entry being full. Times are milliseconds per layer, the median of runs that take turns; errors are the largest at tokens that are
no padding, against torch in float32.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_on_gpu import DTYPES, kernels_of, session_of, timed
from benchmarks.packing_models import FORMS, KINDS, Encoder, operators

_CODES = {torch.float16: 10, torch.float32: 1}


class Data:
    """Inputs on the GPU, padded on the right."""

    def __init__(self, batch: int, length: int, width: int, dtype: torch.dtype, kept: float) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(batch, length, width, device="cuda").to(dtype)
        self.lengths = lengths_of(batch, length, kept)
        places = torch.arange(length)
        self.kept = (places[None] < torch.tensor(self.lengths)[:, None]).cuda()
        self.mask = self.kept.long()
        self.results = [torch.empty_like(self.x)]

    def bound(self, session: Any) -> Any:
        """The inputs and the output of a session, all on the GPU."""
        binding = session.io_binding()
        for name, tensor in (("x", self.x), ("mask", self.mask)):
            code: Any = np.int64 if tensor.dtype == torch.int64 else _CODES[tensor.dtype]
            binding.bind_input(name, "cuda", 0, code, list(tensor.shape), tensor.data_ptr())
        out = self.results[0]
        binding.bind_output("out", "cuda", 0, _CODES[out.dtype], list(out.shape), out.data_ptr())
        return binding


def lengths_of(batch: int, length: int, kept: float) -> list[int]:
    """Lengths of entries: one full, the others spread evenly, `kept` of all together."""
    if batch == 1:
        return [length]
    mean = max(1.0, (batch * kept - 1) / (batch - 1) * length)
    spread = min(mean - 1, length - mean)
    return [length, *(round(float(item)) for item in np.linspace(mean - spread, mean + spread, batch - 1))]


def torch_runs(encoder: torch.nn.Module, data: Data) -> dict[str, Callable[[], object]]:
    """Torch on padded tensors with a mask, and on nested ones, whose flash kernel takes lengths."""
    entries = [row[:length] for row, length in zip(data.x, data.lengths, strict=True)]
    nested = torch.nested.nested_tensor(entries, layout=torch.jagged)

    def padded() -> object:
        with torch.inference_mode():
            return encoder(data.x, data.mask)

    def jagged() -> object:
        with torch.inference_mode(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return encoder(nested)

    return {name: run for name, run in (("torch padded", padded), ("torch nested", jagged)) if _runs(name, run)}


def _runs(name: str, run: Callable[[], object]) -> bool:
    try:
        run()
    except RuntimeError as error:
        print(f"{name}: {' '.join(str(error).split())[:120]}", flush=True)
        return False
    return True


def cell(name: str, size: tuple[int, ...], folder: pathlib.Path, kept: float) -> dict[str, Any]:
    """Everything about one model at one size."""
    kind, _, dtype_name = name.split("-")
    batch, length, heads, head = size
    data = Data(batch, length, heads * head, DTYPES[dtype_name], kept)
    encoder = Encoder(kind, heads, head).eval().cuda()
    with torch.inference_mode():
        wanted = encoder(data.x.float(), data.mask)
    found: dict[str, Any] = {"name": name, "size": list(size), "kept": sum(data.lengths) / (batch * length)}
    found |= {"ms": {}, "error": {}, "failed": {}, "ran": {}}
    runs: dict[str, Callable[[], object]] = {}
    alive: list[Any] = []
    paths = {"unfused": folder / f"{name}.onnx"} | {form: folder / f"{name}.{form}.onnx" for form in FORMS}
    for form, path in paths.items():
        if not path.exists():
            continue
        try:
            found["ran"][form] = [*kernels_of(path, data), operators(path)]
            session = session_of(path)
            binding = data.bound(session)
            session.run_with_iobinding(binding)
            found["error"][form] = float((data.results[0].float() - wanted)[data.kept].abs().max())
            alive.append((session, binding))
            runs[form] = lambda session=session, binding=binding: session.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            found["failed"][form] = " ".join(str(error).split())[:160]
    runs |= torch_runs(encoder.to(DTYPES[dtype_name]), data)
    found["ms"] = timed(runs)
    return found


def main() -> None:
    """Measures until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--sizes", default="8x512x12x64,32x128x12x64,8x1024x16x64,4x2048x16x64")
    parser.add_argument("--dtypes", default="float16,float32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--kept", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=400)
    chosen = parser.parse_args()
    cells: list[dict[str, Any]] = []
    start = time.perf_counter()
    for dtype in chosen.dtypes.split(","):
        for text in chosen.sizes.split(","):
            size = tuple(map(int, text.split("x")))
            for kind in chosen.kinds.split(","):
                name = f"{kind}-{size[2]}x{size[3]}-{dtype}"
                if not (chosen.folder / f"{name}.onnx").exists() or time.perf_counter() - start > chosen.seconds:
                    continue
                try:
                    cells.append(cell(name, size, chosen.folder, chosen.kept))
                except Exception as error:  # noqa: BLE001 - such as too little memory for one of them
                    cells.append({"name": name, "size": list(size), "broken": str(error)[:200]})
                torch.cuda.empty_cache()
                print(json.dumps(cells[-1]), flush=True)
            chosen.out.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
