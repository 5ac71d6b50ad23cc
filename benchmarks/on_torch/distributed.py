"""DistributedDataParallel and fully sharded training of fused modules: losses beside those of one process on the whole batch.

Two processes, with NCCL on two GPUs or gloo on a CPU.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.harness import WRONG, Benchmark, Cells, Row, Setting
from benchmarks.on_torch._models import Case, Model, seen, spelled
from onnx_attnfuse.training import fuse

WORLD = 2
KINDS = ("ddp", "fsdp2")
_APART = {"cpu": 1e-5, "cuda": 1e-4}


def case(device: str, mask: str) -> Case:
    """A small model, larger on a GPU."""
    shape: dict[str, Any] = {"width": 64, "heads": 4, "kv_heads": 4, "layers": 2} if device == "cpu" else {"layers": 2}
    return Case(mask, mask, 4, 64 if device == "cpu" else 512, window=16 if device == "cpu" else 128, document=32, **shape)


def losses(kind: str, mask: str, device: str, steps: int, rest: str) -> list[float]:
    """The mean loss of each step over all processes.

    Args:
        kind: `one` for one process on the whole batch, `ddp`, or `fsdp2`.
        mask: The mask, as `Case` has it.
        device: Where.
        steps: How many.
        rest: The backend for what is no attention.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank = 0 if kind == "one" else dist.get_rank()
    place = device if device == "cpu" else f"cuda:{rank}"
    chosen = case(device, mask)
    model: torch.nn.Module = Model(chosen, spelled, seen).to(place)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(fuse(block, rest=rest))
        fully_shard(model)
    else:
        fuse(model, rest=rest)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    fused = [item.__dict__["attention_reports"] for item in model.modules() if "attention_reports" in item.__dict__]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = chosen.inputs("cpu", torch.float32)
    share = slice(None) if kind == "one" else slice(rank * chosen.batch // WORLD, (rank + 1) * chosen.batch // WORLD)
    given = {name: value[share].to(place) for name, value in inputs.items()}
    found: list[float] = []
    for _ in range(steps):
        loss = model(**given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if kind != "one":
            dist.all_reduce(mean)
            mean /= WORLD
        found.append(float(mean))
    reports = [report for item in fused for report in item]
    if not sum(report.fused for report in reports) or any(report.defect for report in reports):
        raise RuntimeError(f"{kind}, {mask}: {[report.lines() for report in reports]}")
    return found


def worker(rank: int, store: str, out: str, device: str, steps: int, rest: str, mask: str) -> None:
    """One process: every kind, beside one process alone."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, limit = "nccl" if device == "cuda" else "gloo", dt.timedelta(seconds=180)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    rows: list[tuple[str, float, float, float]] = []
    expected = losses("one", mask, device, steps, rest) if rank == 0 else []
    dist.barrier()
    for kind in KINDS:
        found = losses(kind, mask, device, steps, rest)
        if rank == 0:
            apart = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
            rows.append((kind, found[0], found[-1], apart))
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of PyTorch that still run end a process that is torn down by an abort


def measure(rest: str, mask: str, setting: Setting) -> Cells:
    """The first and the last loss, and how far all are from those of one process."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "losses"
        arguments = (str(pathlib.Path(folder) / "store"), str(out), setting.provider, 3 if setting.quick else 6, rest, mask)
        multiprocessing.start_processes(worker, arguments, nprocs=WORLD, start_method="spawn")
        for kind, first, last, apart in json.loads(out.read_text()):
            wrong = "" if apart <= _APART[setting.provider] else f"{WRONG} "
            found[kind] = f"{wrong}{first:.6f} to {last:.6f}, {apart:.1e}"
    return found


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each backend for what is no attention, and each mask."""
    os.environ.setdefault("ATTNFUSE_DEBUG", "0")
    for rest in ("eager",) if setting.quick else ("eager", "inductor"):
        for mask in ("triangle", "padding", "documents"):
            yield Row(f"{mask}, {rest}", functools.partial(measure, rest, mask))


NOTE = "Losses of the first and the last step, and how far all are from those of one process on the whole batch."
BENCHMARK = Benchmark("Two processes on PyTorch", rows, NOTE)
