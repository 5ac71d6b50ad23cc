"""Training steps, forward and backward: eager, torch.compile, ours, and the same models written by hand, in turn.

A step is a pass of a few blocks without an optimizer. A cell has milliseconds, how many times as fast that is as eager in
the same round, how far loss and gradient are from eager's, and the most memory in GB that was allocated in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.on_torch._models import Case, Model, best, best_alone, blocks, blocks_alone, cases, dense, seen, spelled
from onnx_attnfuse.training import fuse

SCALE = 4096.0
"""What losses are multiplied by, as training in float16 does: gradients are too small for that type otherwise."""
_WARM = 4


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    module.compile()
    return module


VARIANTS: dict[str, Callable[[Case], torch.nn.Module]] = {
    "eager": lambda case: Model(case, spelled, seen),
    "dense mask": lambda case: Model(case, dense, seen),
    "by hand": lambda case: Model(case, best_alone, blocks_alone),
    "ours": lambda case: fuse(Model(case, spelled, seen), rest="eager"),
    "by hand + compile": lambda case: _compiled(Model(case, best, blocks)),
    "ours + inductor": lambda case: fuse(Model(case, spelled, seen)),
    "torch.compile": lambda case: _compiled(Model(case, spelled, seen)),
}


class Step:
    """A step that has run, and is run again."""

    def __init__(self, variant: str, case: Case, setting: Setting, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.module = VARIANTS[variant](case).to(setting.provider, dtype)
        self.inputs, self.cuda, self.loss = case.inputs(setting.provider, dtype), setting.cuda, 0.0
        for _ in range(_WARM):
            self()
        self.gigabytes = 0.0
        if self.cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self()
            self.gigabytes = (torch.cuda.max_memory_allocated() - before) / 1e9
        reports = self.module.__dict__.get("attention_reports", ())
        self.kernels = sorted({str(site.kernel) for report in reports for site in report.sites})
        self.words = " ".join([f"{self.gigabytes:.2f} GB" * self.cuda, *self.kernels]).strip()

    def __call__(self) -> None:
        self.module.zero_grad(set_to_none=True)
        loss = self.module(**self.inputs)
        (loss * SCALE).backward()
        if self.cuda:
            torch.cuda.synchronize()
        self.loss = loss.detach()

    def output(self) -> Any:
        """The loss and the size of a gradient, which are compared relative to eager's."""
        found = next(item.grad for name, item in self.module.named_parameters() if name.endswith("query.weight"))
        assert found is not None
        return np.asarray([float(found.float().norm()) / SCALE, float(self.loss)])


def race(case: Case, dtype: torch.dtype, setting: Setting) -> Race:
    """A row."""
    torch._dynamo.reset()
    names = [name for name in VARIANTS if case.mask != "none" or name != "dense mask"]
    variants = {name: functools.partial(Step, name, case, setting, dtype) for name in names}
    return Race(f"{case.name}, {str(dtype).removeprefix('torch.')}, {case.layers} blocks", variants, single=True)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model and type."""
    for dtype in (torch.bfloat16, torch.float16) if setting.cuda else (torch.float32,):
        for case in cases(small=setting.quick):
            yield race(case, dtype, setting)


BENCHMARK = Benchmark("Training on PyTorch", races, __doc__ or "")
