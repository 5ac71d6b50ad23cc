"""Speed and memory of fusing, beside the other tools: ``python benchmarks/fusing.py [--layers 12,24] [--cap SECONDS]``.

Whole commands are measured, start of the interpreter and imports included, one at a time and taking turns. Their outputs are
examined, too: a tool that does nothing would be the fastest. Only the standard library is imported here: Linux counts what a
process was before `exec` in its peak memory, so a child never reports less than its parent held when it was started.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
EXPORTERS = {"ts17": "TorchScript, opset 17", "dyn18": "dynamo, opset 18"}
PACKAGES = ("onnx-attnfuse", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers", "numpy")
REPEATS, PEER_REPEATS, SLOW = 3, 2, 20.0
"""Runs of ours and of others, and the seconds after which another is not run a second time."""
MEMORY = 16 * 2**30
"""Bytes that a command may allocate; one that wants more fails."""
_TAIL = 2000
_CHILD = ("-m", "benchmarks.fusing_child")
_OPTIMIZER = "-m onnxruntime.transformers.optimizer --input MODEL --output OUTPUT --model_type"
TOOLS = {
    "attnfuse": "-m onnx_attnfuse_cli optimize MODEL -o OUTPUT --verify none",
    "onnxscript": f"{' '.join(_CHILD)} onnxscript MODEL OUTPUT",
    "onnxruntime qwen3": f"{_OPTIMIZER} qwen3 SHAPE",
    "onnxruntime gpt2": f"{_OPTIMIZER} gpt2 SHAPE",
}
"""What follows the interpreter; ours first."""
SHAPES = {
    "small": "--num_heads 4 --hidden_size 64",
    "large": "--num_heads 32 --hidden_size 2048 --use_external_data_format",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model that every tool is given."""

    exporter: str
    layers: int
    size: str

    def __str__(self) -> str:
        return f"{self.layers} layers, {EXPORTERS[self.exporter]}" + ", large" * (self.size == "large")

    def command(self, tool: str, model: pathlib.Path, output: pathlib.Path) -> list[str]:
        """The command line of a tool."""
        words = {"MODEL": [str(model)], "OUTPUT": [str(output)], "SHAPE": SHAPES[self.size].split()}
        return [sys.executable, *(item for word in TOOLS[tool].split() for item in words.get(word, [word]))]


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one command took.

    Attributes:
        status: `ok`, `failed`, or `capped` for one that was stopped at the time cap; its figures are lower bounds.
        wall: Seconds from start to end.
        cpu: Seconds of user and system time.
        rss: Peak resident memory in MB (10^6 bytes).
        note: The last line that a command that failed printed.
    """

    status: str
    wall: float
    cpu: float
    rss: float
    note: str = ""


def run(command: Sequence[str], folder: pathlib.Path, cap: float) -> Usage:
    """Runs a command in a folder, for its temporary files too, to its end, or kills it and its children after so many seconds."""
    stopped = threading.Event()

    def stop(group: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended at the last moment
            os.killpg(group, signal.SIGKILL)
            stopped.set()

    environment = os.environ | {"TMPDIR": str(folder)}
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, **options, start_new_session=True, cwd=folder, env=environment)
        resource.prlimit(child.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        timer = threading.Timer(cap, stop, [child.pid])
        timer.start()
        _, code, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        timer.cancel()
        timer.join()
        child.returncode = os.waitstatus_to_exitcode(code)
        size = os.fstat(printed.fileno()).st_size
        lines = os.pread(printed.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").split("\n")
    note = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    status = "capped" if stopped.is_set() else "failed" if child.returncode else "ok"
    return Usage(status, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6, note if status == "failed" else "")


def build(case: Case, cache: pathlib.Path) -> pathlib.Path:
    """The model of a case, exported once and kept in a folder of its own."""
    path = cache / f"decoder_{case.size}_{case.layers}_{case.exporter}" / "model.onnx"
    if not path.exists():
        print(f"exporting {case}", flush=True)
        arguments = ["export", case.exporter, str(case.layers), case.size, str(path)]
        subprocess.run([sys.executable, *_CHILD, *arguments], check=True, capture_output=True)
    return path


def rows(case: Case, model: pathlib.Path, cap: float) -> list[list[str]]:
    """Runs all tools on one model, taking turns; outputs are written beside the model, where its weights are, and deleted."""
    usages: dict[str, list[Usage]] = {tool: [] for tool in TOOLS}
    outputs = {tool: model.with_name(f"output_{index}.onnx") for index, tool in enumerate(TOOLS)}
    ours = next(iter(TOOLS))
    for turn in range(REPEATS):
        for tool, before in usages.items():
            if tool != ours and (turn >= PEER_REPEATS or any(item.status != "ok" or item.wall >= SLOW for item in before)):
                continue
            with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
                before.append(run(case.command(tool, model, outputs[tool]), pathlib.Path(scratch), cap))
            print(f"{case}  {tool}  {before[-1]}", flush=True)
    found: list[list[str]] = []
    first: dict[str, float] = {}
    for tool, runs in usages.items():
        wall, cpu, rss = (statistics.median_low(getattr(item, key) for item in runs) for key in ("wall", "cpu", "rss"))
        first = first or {"wall": wall, "cpu": cpu}
        more = "> " if runs[0].status == "capped" else ""
        ratios = ["", ""] if tool == ours else [f"{more}{wall / first['wall']:.1f}", f"{more}{cpu / first['cpu']:.1f}"]
        figures = [f"{more}{wall:.2f}", f"{more}{cpu:.2f}", *ratios, f"{rss:.0f}"]
        found.append([str(case), tool, *figures, *examined(case, runs[0], model, outputs[tool])])
    return found


def examined(case: Case, usage: Usage, model: pathlib.Path, output: pathlib.Path) -> list[str]:
    """What a tool fused, whether the file loads, and how far results are from the model's; the file is deleted."""
    command = [sys.executable, *_CHILD, "outcome", str(model), str(output), case.size]
    done = subprocess.run(command, check=False, capture_output=True, text=True) if output.exists() else None
    for file in output.parent.glob(f"{output.name}*"):
        file.unlink()
    if usage.status != "ok" or done is None:
        return ["–", {"capped": "stopped", "failed": usage.note, "ok": "wrote nothing"}[usage.status].replace("|", "¦"), ""]
    if done.returncode:
        return ["–", f"the check ended with exit code {done.returncode}", ""]
    told = json.loads(done.stdout)
    fused = ", ".join(f"{count} {name}" for name, count in told["fused"].items())
    difference = f"{told['difference']:.1e}" if "difference" in told else ""
    return [f"{sum(told['fused'].values())} of {case.layers} ({fused})", told["loads"].replace("|", "¦"), difference]


def page(found: Sequence[Sequence[str]], cap: float) -> str:
    """The whole of `fusing.md`."""
    head = ["model", "tool", "wall s", "CPU s", "× wall", "× CPU", "peak MB", "sites fused", "loads", "max. difference"]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    machine = [f"python {platform.python_version()}", f"{platform.system()} {platform.machine()}", f"{os.cpu_count()} processors"]
    parts = [
        "# Fusing: speed and memory",
        f"Written by `python benchmarks/fusing.py`. `×` is how many times as long as the first tool, medians of {REPEATS} runs "
        f"in turns; others were stopped after {cap:.0f} s. {', '.join([*machine, *versions])}.",
        "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *found]),
        "\n".join(f"- {tool}: `python {command}`" for tool, command in TOOLS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Measures all cases and writes the page after each, so that an interrupted run leaves what it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="12,24,48,96", help="depths of the small decoders, with commas; may be empty")
    parser.add_argument("--cap", type=float, default=400, help="seconds for one run of another tool")
    parser.add_argument("--cache", type=pathlib.Path, default=HERE.parent / "build" / "benchmarks", help="where exports are kept")
    parser.add_argument("--to", type=pathlib.Path, default=HERE / "results" / "fusing.md", help="the page")
    parser.add_argument("--no-large", action="store_true", help="without the model of more than 2 GB")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *sys.path[1:]])
    depths = [int(text) for text in options.layers.split(",") if text]
    cases = [Case(exporter, layers, "small") for layers in depths for exporter in EXPORTERS]
    cases += [] if options.no_large else [Case("dyn18", 12, "large")]
    cache = options.cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    if not options.no_large and shutil.disk_usage(cache).free < 10e9:
        parser.error("the outputs for the large model need 10 GB of disk; give another --cache")
    models = {case: build(case, cache) for case in cases}
    with tempfile.TemporaryDirectory(dir=cache) as scratch:  # once unmeasured, so that none pays for compiling its modules
        smallest = min(models, key=lambda case: models[case].stat().st_size)
        for tool in TOOLS:
            run(smallest.command(tool, models[smallest], pathlib.Path(scratch, "warm.onnx")), pathlib.Path(scratch), 120)
    found: list[list[str]] = []
    for case, model in models.items():
        found += rows(case, model, options.cap)
        options.to.write_text(page(found, options.cap), encoding="utf-8")
    print(page(found, options.cap))
    return 0


if __name__ == "__main__":
    sys.exit(main())
