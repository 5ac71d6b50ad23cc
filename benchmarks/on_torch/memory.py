"""Memory of a training step at growing lengths: one block with a window, documents, or a computed triangle, eager and ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.harness import Benchmark, Cells, Row, Setting, one_line
from benchmarks.on_torch._models import Case
from benchmarks.on_torch.steps import Step

LENGTHS, EAGER_UP_TO = (2048, 4096, 8192, 16384, 32768), 8192
MASKS = ("documents", "window", "computed triangle")


def measure(mask: str, variant: str, setting: Setting) -> Cells:
    """Gigabytes of a step beyond what was there before it, by length."""
    found: dict[str, str] = {}
    shape = {"width": 64, "heads": 4, "kv_heads": 4} if setting.quick else {}
    for length in (128, 256) if setting.quick else LENGTHS:
        if variant == "eager" and length > EAGER_UP_TO:
            continue
        torch._dynamo.reset()
        case = Case(mask, mask, 1, length, layers=1, window=min(512, length // 4), **shape)
        try:
            step = Step(variant, case, setting, torch.bfloat16 if setting.cuda else torch.float32)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            found[str(length)] = one_line(error)
            continue
        found["kernel"] = ", ".join(step.kernels)
        found[str(length)] = f"{step.gigabytes:.3f}" if setting.cuda else "runs"
    return found


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each mask."""
    for mask, variant in (*((mask, "ours") for mask in setting.some(MASKS)), (MASKS[0], "eager")):
        yield Row(f"{mask}, {variant}", functools.partial(measure, mask, variant))


BENCHMARK = Benchmark("Memory of a training step on PyTorch", rows, "Gigabytes beyond parameters and inputs, by length.")
