"""DistributedDataParallel and fully sharded training of fused modules: losses beside those of one process on the whole batch.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_distributed.py [--device cpu] [--steps 6] [--rest inductor]

Two processes, with NCCL on two GPUs or gloo on a CPU. Prints the losses, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.training_torch_models import Case, Model, seen, spelled
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


def worker(rank: int, store: str, chosen: argparse.Namespace) -> None:
    """One process: every kind and mask, beside one process alone."""
    device, steps, rest = chosen.device, chosen.steps, chosen.rest
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, limit = "nccl" if device == "cuda" else "gloo", dt.timedelta(seconds=180)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    wrong = False
    for mask in chosen.masks.split(","):
        expected = losses("one", mask, device, steps, rest) if rank == 0 else []
        dist.barrier()
        for kind in chosen.kinds.split(","):
            found = losses(kind, mask, device, steps, rest)
            if rank == 0:
                apart = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
                wrong |= apart > _APART[device]
                result = {"kind": kind, "mask": mask, "rest": rest, "first": found[0], "last": found[-1], "apart": apart}
                words = f"{kind}, {mask}: losses {found[0]:.6f} to {found[-1]:.6f}, beside one process {apart:.1e}"
                print(json.dumps(result) if chosen.json else words, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(int(wrong))  # threads of PyTorch that still run end a process that is torn down by an abort


def table(found: Sequence[Mapping[str, Any]], machine: str) -> str:
    """All results, a line for each way, mask and backend."""
    lines = [
        "# Two processes on PyTorch",
        "",
        f"Losses of the first and the last step, and how far all are from those of one process on the whole batch. {machine}",
        "",
        "| | mask | rest | first | last | apart |",
        "|---|---|---|---:|---:|---:|",
    ]
    for item in found:
        numbers = f"{item['first']:.6f} | {item['last']:.6f} | {item['apart']:.1e}"
        lines.append(f"| {item['kind']} | {item['mask']} | {item['rest']} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Starts two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rest", default="eager")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--masks", default="triangle,padding,documents")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each result")
    chosen = parser.parse_args()
    os.environ.setdefault("ATTNFUSE_DEBUG", "0")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(pathlib.Path(folder) / "store"), chosen)
        multiprocessing.start_processes(worker, arguments, nprocs=WORLD, start_method="spawn")


if __name__ == "__main__":
    main()
