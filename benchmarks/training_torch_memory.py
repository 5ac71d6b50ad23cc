"""Memory of a training step on PyTorch at growing lengths: one block with a window, documents, or a triangle, eager and ours.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_all.py OUT_FOLDER

Memory is the most that was allocated in a step, beyond the parameters and inputs that were there before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.training_torch import VARIANTS, peak, step
from benchmarks.training_torch_models import Case

LENGTHS = (2048, 4096, 8192, 16384, 32768)
MASKS = ("documents", "window", "computed triangle")
EAGER_UP_TO = 8192


@dataclasses.dataclass(frozen=True)
class Step:
    """The memory of one step."""

    mask: str
    variant: str
    length: int
    gigabytes: float | None
    kernel: str = ""


def measure(mask: str, variant: str, length: int, device: str, *, small: bool) -> Step:
    """Takes the memory of a step, after one that compiles."""
    torch._dynamo.reset()
    shape: Mapping[str, Any] = {"width": 64, "heads": 4, "kv_heads": 4} if small else {}
    case = Case(mask, mask, 1, length, layers=1, window=min(512, length // 4), **shape)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    module, inputs = VARIANTS[variant](case).to(device, dtype), case.inputs(device, dtype)
    step(module, inputs)
    module.zero_grad(set_to_none=True)
    before = 0 if device == "cpu" else torch.cuda.memory_allocated()
    with peak(device) as found:
        step(module, inputs)
    taken = None if found[0] is None else found[0] - before / 1e9
    reports = module.__dict__.get("attention_reports", ())
    return Step(mask, variant, length, taken, ", ".join(sorted({str(s.kernel) for report in reports for s in report.sites})))


def table(steps: Sequence[Mapping[str, Any]], machine: str) -> str:
    """A line for each mask and variant, a column for each length."""
    lengths = sorted({item["length"] for item in steps})
    lines = [
        "# Memory of a training step on PyTorch",
        "",
        f"GB that a forward and a backward pass of one block take beyond parameters and inputs. {machine}",
        "",
        "| mask | | kernel | " + " | ".join(map(str, lengths)) + " | for each token, longest to shortest |",
        "|---|---|---|" + "---:|" * (len(lengths) + 1),
    ]
    found: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for item in steps:
        found.setdefault((item["mask"], item["variant"]), {})[item["length"]] = item
    for (mask, variant), at in found.items():
        taken = {length: item["gigabytes"] for length, item in at.items() if item["gigabytes"] is not None}
        cells = " | ".join(f"{taken[length]:.3f}" if length in taken else "" for length in lengths)
        first, last = min(taken, default=0), max(taken, default=0)
        growth = f"{taken[last] / last / (taken[first] / first):.2f}" if last > first else ""
        kernel = next(iter(at.values()))["kernel"]
        lines.append(f"| {mask} | {variant} | {kernel} | {cells} | {growth} |")
    return "\n".join(lines) + "\n"
