"""Training steps on PyTorch, forward and backward: eager, torch.compile, ours, and the same models written by hand.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_all.py OUT_FOLDER --minutes 10

That is how to call it: `training_torch_all.py` measures all of this and more in the order of its importance, each in time, and
writes after each. To try some of it by itself:

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch.py OUT_FOLDER [--device cpu --small] [--only vit] [--seconds 330]

A step is a forward and a backward pass of a few blocks, without an optimizer; memory is the most that was allocated in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.training_torch_models import Case, Model, best, best_alone, blocks, blocks_alone, cases, dense, seen, spelled
from onnx_attnfuse.training import fuse

RUNS, WARM, PROFILED = 12, 4, 3
SCALE = 4096.0
"""What losses are multiplied by, as training in float16 does: gradients are too small for that type otherwise."""
VARIANTS: dict[str, Callable[[Case], torch.nn.Module]] = {
    "eager": lambda case: Model(case, spelled, seen),
    "dense mask": lambda case: Model(case, dense, seen),
    "ours": lambda case: fuse(Model(case, spelled, seen), rest="eager"),
    "by hand": lambda case: Model(case, best_alone, blocks_alone),
    "ours + inductor": lambda case: fuse(Model(case, spelled, seen)),
    "by hand + compile": lambda case: _compiled(Model(case, best, blocks)),
    "torch.compile": lambda case: _compiled(Model(case, spelled, seen)),
}
HEAD = """# Training on PyTorch

Milliseconds for a forward and a backward pass of a few blocks, median of {runs} runs, and the most memory that was allocated, in
GB. `dense mask` is one call of `scaled_dot_product_attention` with the whole mask, `by hand` the best call that is known, flex
attention for padding, windows and documents. {machine}

| | type | blocks | {names} |
|---|---|---|{lines}|
"""


@dataclasses.dataclass
class Cell:
    """One measurement."""

    case: str
    dtype: str
    variant: str
    milliseconds: float | None = None
    gigabytes: float | None = None
    loss: float | None = None
    gradient: float | None = None
    kernels: list[str] = dataclasses.field(default_factory=list[str])
    first_step: float | None = None
    failure: str | None = None


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    module.compile()
    return module


def measure(case: Case, variant: str, device: str, dtype: torch.dtype) -> Cell:
    """Builds a model and takes the time of its steps."""
    cell = Cell(case.name, str(dtype).removeprefix("torch."), variant)
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        module = VARIANTS[variant](case).to(device, dtype)
        inputs = case.inputs(device, dtype)
        start = time.perf_counter()
        cell.loss, cell.gradient = step(module, inputs)
        cell.first_step = time.perf_counter() - start
        for _ in range(WARM):
            step(module, inputs)
        with peak(device) as found:
            cell.milliseconds = statistics.median(timed(module, inputs, device) for _ in range(RUNS))
        cell.gigabytes = found[0]
        reports = module.__dict__.get("attention_reports", ())
        cell.kernels = sorted({line for report in reports for line in report.lines()[1:]})[:2]
    except torch.OutOfMemoryError:
        cell.failure = "out of memory"
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        cell.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
    return cell


def step(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """One pass; the loss, and the size of a gradient."""
    module.zero_grad(set_to_none=True)
    loss = module(**inputs)
    (loss * SCALE).backward()
    parameter = next(item for name, item in module.named_parameters() if name.endswith("query.weight"))
    assert parameter.grad is not None
    return float(loss.detach()), float(parameter.grad.float().norm())


def timed(module: torch.nn.Module, inputs: dict[str, torch.Tensor], device: str) -> float:
    """Milliseconds of one pass."""
    module.zero_grad(set_to_none=True)
    if device == "cpu":
        start = time.perf_counter()
        (module(**inputs) * SCALE).backward()
        return 1e3 * (time.perf_counter() - start)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    (module(**inputs) * SCALE).backward()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


@contextlib.contextmanager
def peak(device: str) -> Iterator[list[float | None]]:
    """The most memory that is allocated inside, in GB; None on a CPU."""
    found: list[float | None] = [None]
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    yield found
    if device != "cpu":
        found[0] = torch.cuda.max_memory_allocated() / 1e9


def case_of(name: str, *, small: bool) -> Case:
    """The case of a name."""
    return next(case for case in cases(small=small) if case.name == name)


def profiled(case: Case, variant: str, device: str) -> dict[str, Any]:
    """Where the time of a step goes: kernels by their names, and how long the GPU has nothing to do."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    module, inputs = VARIANTS[variant](case).to(device, dtype), case.inputs(device, dtype)
    for _ in range(WARM):
        step(module, inputs)
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([] if device == "cpu" else [torch.profiler.ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(PROFILED):
            timed(module, inputs, device)
    times: dict[str, list[float]] = {}
    for event in profile.events() or ():
        if device == "cpu" or str(event.device_type).endswith("CUDA"):
            spent = event.self_cpu_time_total if device == "cpu" else event.self_device_time_total
            times.setdefault(event.name[:70], []).append(spent / 1e3 / PROFILED)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {
        "case": case.name,
        "variant": variant,
        "whole": statistics.median(timed(module, inputs, device) for _ in range(RUNS)),
        "busy": sum(map(sum, times.values())),
        "launches": sum(map(len, times.values())) / PROFILED,
        "kernels": [[name, sum(spent), len(spent) / PROFILED] for name, spent in ordered[:12]],
    }


def costs(found: list[dict[str, Any]]) -> str:
    """Where the time goes, as text."""
    lines = ["", "Where the time of a step goes, in milliseconds:", ""] if found else []
    for item in found:
        kernels = "; ".join(f"{spent:.2f} {name} ({count:g})" for name, spent, count in item["kernels"][:6])
        whole = f"{item['whole']:.2f}, of which kernels {item['busy']:.2f} in {item['launches']:g}"
        lines.append(f"- {item['case']}, {item['variant']}: {whole}: {kernels}")
    return "\n".join(lines) + "\n" if lines else ""


def table(cells: list[Cell], known: list[Case], machine: str) -> str:
    """All measurements, a line for each model and type."""
    names = list(VARIANTS)
    text = HEAD.format(runs=RUNS, machine=machine, names=" | ".join(names), lines="|".join("---:" for _ in names))
    for case in known:
        for dtype in dict.fromkeys(cell.dtype for cell in cells if cell.case == case.name):
            found = {cell.variant: cell for cell in cells if (cell.case, cell.dtype) == (case.name, dtype)}
            row = " | ".join(words(found.get(name)) for name in names)
            text += f"| {case.name} | {dtype} | {case.layers} | {row} |\n"
    kernels = [f"- {cell.case}, {cell.dtype}: {line}" for cell in cells if cell.variant == "ours" for line in cell.kernels[:1]]
    losses = [f"- {item}" for item in apart(cells)]
    return (
        text
        + "\nKernels of ours:\n\n"
        + "\n".join(kernels)
        + "\n\nLosses and gradients beside eager's:\n\n"
        + "\n".join(losses)
        + "\n"
    )


def words(cell: Cell | None) -> str:
    """A cell of the table."""
    if cell is None:
        return ""
    if cell.failure is not None or cell.milliseconds is None:
        return cell.failure or ""
    return f"{cell.milliseconds:.2f}" + ("" if cell.gigabytes is None else f" ({cell.gigabytes:.2f})")


def apart(cells: list[Cell]) -> Iterator[str]:
    """How far losses and gradients are from eager's, in parts of them."""
    for cell in cells:
        base = next((item for item in cells if (item.case, item.dtype, item.variant) == (cell.case, cell.dtype, "eager")), None)
        if base is None or base is cell or base.loss is None or cell.loss is None or not base.gradient or cell.gradient is None:
            continue
        loss, gradient = abs(cell.loss - base.loss) / abs(base.loss), abs(cell.gradient - base.gradient) / base.gradient
        yield f"{cell.case}, {cell.dtype}, {cell.variant}: loss {loss:.1e}, gradient {gradient:.1e}"


def main() -> None:
    """Measures everything, and writes after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    chosen = parser.parse_args()
    start, cells = time.monotonic(), list[Cell]()
    known = [case for case in cases(small=chosen.small) if any(part in case.name for part in chosen.only.split(","))]
    gpu = torch.cuda.get_device_name() if chosen.device != "cpu" else "CPU"
    machine = f"{gpu}, torch {torch.__version__}."
    chosen.folder.mkdir(parents=True, exist_ok=True)
    plan = [
        (dtype, case, variant) for dtype in chosen.dtypes.split(",") for case in known for variant in chosen.variants.split(",")
    ]
    for name, case, variant in plan:
        if time.monotonic() - start > chosen.seconds:
            print(f"not measured: {name}, {case.name}, {variant}", file=sys.stderr)
            continue
        cell = measure(case, variant, chosen.device, getattr(torch, name))
        gc.collect()
        if chosen.device != "cpu":
            torch.cuda.empty_cache()
        cells.append(cell)
        print(f"{time.monotonic() - start:6.1f} s  {dataclasses.asdict(cell)}", flush=True)
        found = {"machine": machine, "cells": [dataclasses.asdict(item) for item in cells]}
        (chosen.folder / "training_torch.json").write_text(json.dumps(found, indent=1) + "\n")
        (chosen.folder / "training_torch.md").write_text(table(cells, known, machine))


if __name__ == "__main__":
    main()
