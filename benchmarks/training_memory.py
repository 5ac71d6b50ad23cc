"""Time and memory of a step on the CPU at growing lengths: plain ORTModule and ours, each in a process of its own.

PYTHONPATH=. .venv-training/bin/python benchmarks/training_memory.py
"""

from __future__ import annotations

import os

os.environ |= {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "ATTNFUSE_DEBUG": "0"}

import json
import pathlib
import resource
import subprocess
import sys
import time
import warnings

RESULTS = pathlib.Path(__file__).parent / "results" / "training_memory.md"
LENGTHS = (256, 512, 1024, 2048, 4096)
HEADS, SIZE, STEPS = 8, 64, 6


def measured(which: str, length: int) -> tuple[float, float]:
    """Seconds of the fastest step and MiB at the peak, beyond what was there before the first step."""
    import torch

    from onnx_attnfuse.training import ORTModule
    from onnx_attnfuse.training.installed import ortmodule

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joined, self.out = torch.nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), torch.nn.Linear(HEADS * SIZE, HEADS * SIZE)

        def forward(self, x):
            query, key, value = (item.view(1, -1, HEADS, SIZE).transpose(1, 2) for item in self.joined(x).chunk(3, -1))
            weights = (query @ key.transpose(2, 3) / SIZE**0.5).softmax(-1)
            return self.out((weights @ value).transpose(1, 2).reshape(1, -1, HEADS * SIZE))

    wrap = ORTModule if which == "ours" else ortmodule().ORTModule
    module = wrap(Layer().train())
    module(torch.randn(1, 16, HEADS * SIZE)).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: list[float] = []
    x = torch.randn(1, length, HEADS * SIZE)
    for _ in range(STEPS):
        start = time.perf_counter()
        module(x).sum().backward()
        times.append(time.perf_counter() - start)
    return min(times), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    warnings.filterwarnings("ignore")
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(measured(sys.argv[1], int(sys.argv[2]))) + "\n")
        return
    rows: list[str] = []
    for length in LENGTHS:
        cells: list[str] = []
        for which in ("plain", "ours"):
            run = [sys.executable, __file__, which, str(length)]
            found = subprocess.run(run, capture_output=True, text=True, check=True)
            seconds, peak = json.loads(found.stdout.splitlines()[-1])
            cells += [f"{1000 * seconds:.0f}", f"{peak:.0f}"]
        rows.append(f"| {length} | {cells[0]} | {cells[2]} | {cells[1]} | {cells[3]} |")
    text = [
        "# A step of one attention layer on the CPU",
        "",
        f"{HEADS} heads of {SIZE}, one entry, float32, two cores that others use too; memory is what the steps add to the",
        "process at its peak.",
        "",
        "| length | plain ORTModule, ms | ours, ms | plain ORTModule, MiB | ours, MiB |",
        "|---|---|---|---|---|",
        *rows,
    ]
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
