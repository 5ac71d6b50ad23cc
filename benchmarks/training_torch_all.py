"""All that is measured of training on PyTorch on a GPU, in the order of its importance, as far as the time goes.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_all.py OUT_FOLDER --minutes 10 [--device cpu --small]

On a machine with one GPU: steps, policies, memory by length, and where the time goes. With two: training in two processes. Each
row has its own time and is measured in a process beside this one, which is started again where a row ends it; after each row the
folder has `training_torch.json`, which later runs add to, and a table for each kind of row.
"""

from __future__ import annotations

import os

os.environ |= {"ATTNFUSE_DEBUG": "0", "KINETO_LOG_LEVEL": "5"}

import argparse
import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import multiprocessing

ROW_SECONDS, LONG_SECONDS, LEAST_SECONDS = 100.0, 200.0, 15.0
"""For a row; for two processes, and block masks of many blocks that PyTorch itself sorts, compiled for minutes; to begin one."""
_MASKS = ("triangle", "padding", "documents")
_RULES = ("documents", "window", "llama")
"""Cases whose masks go to flex attention as rules."""
_FATAL = ("AcceleratorError", "CUDA error", "CUBLAS", "device-side")
"""Parts of failures after which a process can measure nothing more."""
Row = dict[str, Any]


def rows(*, small: bool) -> list[Row]:
    """What one GPU measures, the most important first."""
    from benchmarks.training_torch import VARIANTS
    from benchmarks.training_torch_memory import EAGER_UP_TO, LENGTHS, MASKS
    from benchmarks.training_torch_models import cases
    from benchmarks.training_torch_policy import MASKS as POLICY_MASKS

    names = [case.name for case in cases(small=small)]

    def steps(part: str, dtype: str, *variants: str) -> Iterator[Row]:
        for name in names:
            if name.startswith(part):
                for variant in variants or VARIANTS:
                    if variant != "dense mask" or not name.startswith("vit"):
                        yield {"kind": "steps", "case": name, "dtype": dtype, "variant": variant}

    compiled = ("ours + inductor", "by hand + compile", "torch.compile")
    ours = ("ours", "by hand", *compiled)
    quick = ("eager", "dense mask", "ours", "by hand")
    lengths = (128, 256) if small else LENGTHS
    found: list[Row] = [
        *steps("documents", "bfloat16", "ours", "ours + inductor", "torch.compile"),
        *steps("vit", "bfloat16"),
        *steps("gpt2-medium 4096", "bfloat16"),
        *({"kind": "policy", "mask": mask} for mask in POLICY_MASKS),
        *steps("window", "bfloat16", *ours),
        *steps("llama", "bfloat16", *ours),
        *({"kind": "profile", "case": name, "variant": "ours"} for name in names if name.startswith(_RULES)),
        *({"kind": "profile", "case": name, "variant": "by hand"} for name in names if name.startswith(_RULES[1:])),
        *({"kind": "memory", "mask": mask, "variant": "ours", "length": length} for mask in MASKS for length in lengths),
        *steps("gpt2", "bfloat16"),
        *steps("documents", "bfloat16", *quick[:2]),
        *steps("window", "bfloat16", *quick[:2]),
        *steps("llama", "bfloat16", *quick[:2]),
        *steps("gpt2-medium 1024", "float16"),
        *steps("window", "float16"),
        *(
            {"kind": "memory", "mask": MASKS[0], "variant": "eager", "length": length}
            for length in lengths
            if length <= EAGER_UP_TO
        ),
        *steps("documents", "bfloat16", "by hand"),
        {"kind": "profile", "case": names[0], "variant": "by hand"},
        *steps("llama", "float16"),
        *steps("vit", "float16"),
        *steps("documents", "bfloat16", "by hand + compile"),
        *steps("documents", "float16", "ours", "ours + inductor", "eager", "dense mask", "torch.compile"),
        *steps("gpt2-medium 4096", "float16"),
    ]
    return [row for place, row in enumerate(found) if row not in found[:place]]


def measured(row: Row, device: str, *, small: bool) -> list[Row]:
    """Measures a row: its results, one or several."""
    import torch

    from benchmarks import training_torch, training_torch_memory, training_torch_policy

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    kind = row["kind"]
    if kind == "steps":
        case = training_torch.case_of(row["case"], small=small)
        cell = training_torch.measure(case, row["variant"], device, getattr(torch, row["dtype"]))
        return [dataclasses.asdict(cell)]
    if kind == "memory":
        step = training_torch_memory.measure(row["mask"], row["variant"], row["length"], device, small=small)
        return [dataclasses.asdict(step)]
    if kind == "profile":
        case = training_torch.case_of(row["case"], small=small)
        return [training_torch.profiled(case, row["variant"], device)]
    return [training_torch_policy.tried(setting, row["mask"], device) for setting in training_torch_policy.SETTINGS]


def work(pipe: Any, device: str, small: bool, log: str) -> None:
    """The process beside: measures what it is sent; what PyTorch writes on stderr goes to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    while (row := pipe.recv()) is not None:
        try:
            results, failure = measured(row, device, small=small), None
        except Exception as error:  # noqa: BLE001 - the row has failed
            results, failure = [], f"{type(error).__name__}: {str(error).strip()[:300]}"
        failure = failure or next((item["failure"] for item in results if item.get("failure")), None)
        pipe.send((results, failure))
        if failure is not None and any(part in failure for part in _FATAL):
            break
    pipe.close()
    os._exit(0)


class Worker:
    """The process beside this one, started where there is none."""

    def __init__(self, device: str, folder: pathlib.Path, *, small: bool) -> None:
        self._given = device, small, str(folder / "stderr.txt")
        self._process: Any = None
        self._pipe: Any = None

    def measure(self, row: Row, seconds: float) -> tuple[list[Row], str | None]:
        """The results of a row, or why there are none; what takes too long is ended."""
        if self._process is None or not self._process.is_alive():
            self._start()
        try:
            self._pipe.send(row)
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            failure = f"not done in {seconds:.0f} s"
        except (EOFError, OSError):
            failure = "the process ended"
        self.end()
        return [], failure

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(other, *self._given))
        self._process.start()
        other.close()

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None


class Results:
    """What was measured, written after each row."""

    def __init__(self, folder: pathlib.Path, machine: str, *, small: bool) -> None:
        self._folder, self._machine, self._small = folder, machine, small
        self._path = folder / "training_torch.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.done: list[Row] = json.loads(self._path.read_text())["rows"] if self._path.exists() else []

    def has(self, row: Row) -> bool:
        """Whether a row was measured without a failure before."""
        return any(item["row"] == row and item["failure"] is None for item in self.done)

    def add(self, row: Row, results: list[Row], failure: str | None) -> None:
        """Keeps the results of a row, in the place of older ones, and writes everything."""
        self.done = [item for item in self.done if item["row"] != row]
        self.done.append({"row": row, "results": results, "failure": failure})
        self._path.write_text(json.dumps({"machine": self._machine, "rows": self.done}, indent=1) + "\n")
        for name, text in self.tables().items():
            (self._folder / name).write_text(text)

    def tables(self) -> Mapping[str, str]:
        """The tables by the names of their files."""
        from benchmarks import training_torch, training_torch_distributed, training_torch_memory, training_torch_policy
        from benchmarks.training_torch_models import cases

        found = {
            kind: [result for item in self.done if item["row"]["kind"] == kind for result in item["results"]]
            for kind in ("steps", "policy", "memory", "profile", "distributed")
        }
        tables: dict[str, str] = {}
        if found["steps"]:
            cells = [training_torch.Cell(**item) for item in found["steps"]]
            text = training_torch.table(cells, cases(small=self._small), self._machine) + training_torch.costs(found["profile"])
            tables["training_torch.md"] = text
        if found["policy"]:
            tables["training_torch_policy.md"] = training_torch_policy.table(found["policy"], self._machine)
        if found["memory"]:
            tables["training_torch_memory.md"] = training_torch_memory.table(found["memory"], self._machine)
        if found["distributed"]:
            tables["training_torch_distributed.md"] = training_torch_distributed.table(found["distributed"], self._machine)
        return tables


def distributed(row: Row, device: str, seconds: float) -> tuple[list[Row], str | None]:
    """Trains in two processes of their own; what was done before a failure counts."""
    from benchmarks import training_torch_distributed

    command = [sys.executable, str(pathlib.Path(__file__).with_name("training_torch_distributed.py")), "--device", device]
    command += ["--masks", row["mask"], "--rest", row["rest"], "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "4" if device == "cuda" else "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment)
    try:
        output, errors = process.communicate(timeout=seconds)
        late = ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, errors = process.communicate()
        late = f"not done in {seconds:.0f} s"
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    failure = late or "; ".join(errors.strip().splitlines()[-2:])[:300] or f"exit {process.returncode}"
    return results, None if len(results) == len(training_torch_distributed.KINDS) else failure


def main() -> None:
    """Measures rows until the time is over."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--two", action="store_true", help="two processes, which is what is done where there are two GPUs")
    parser.add_argument("--only", default="", help="kinds of rows, with commas")
    chosen = parser.parse_args()
    start, last = time.monotonic(), 60 * chosen.minutes
    two = chosen.two or torch.cuda.device_count() > 1
    wanted: list[Row] = (
        [{"kind": "distributed", "mask": mask, "rest": rest} for rest in ("eager", "inductor") for mask in _MASKS]
        if two
        else rows(small=chosen.small)
    )
    gpu = torch.cuda.get_device_name() if chosen.device != "cpu" else "CPU"
    results = Results(chosen.folder, f"{gpu}, torch {torch.__version__}.", small=chosen.small)
    worker = Worker(chosen.device, chosen.folder, small=chosen.small)
    for row in wanted:
        left = last - (time.monotonic() - start)
        if results.has(row) or (chosen.only and row["kind"] not in chosen.only.split(",")):
            continue
        if left < LEAST_SECONDS:
            print(f"not measured: {row}", flush=True)
            continue
        long = two or (row.get("case", "").startswith(_RULES[0]) and row["variant"].startswith("by hand"))
        seconds = min(LONG_SECONDS if long else ROW_SECONDS, left)
        found, failure = distributed(row, chosen.device, seconds) if two else worker.measure(row, seconds)
        results.add(row, found, failure)
        shown = found if len(found) < 2 else f"{len(found)} results"
        print(f"{time.monotonic() - start:6.1f} s  {row}  {failure or shown}", flush=True)
    worker.end()


if __name__ == "__main__":
    main()
