"""Many models on an execution provider, each export beside what is written for it.

    python -m benchmarks.providers --ep NAME FOLDER ...

Each folder has exports and, beside each, an archive of its inputs by case. `make providers` does it for all that runs on a Linux
machine without a GPU.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import click

from benchmarks.on_providers.children import Child
from benchmarks.on_providers.judge import EMULATED, Row, judged
from benchmarks.on_providers.tables import page
from benchmarks.on_providers.writer import ATTENTION
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.verify.subprocess_runner import ProcessDied, Worker

OPTIONS = {"openvino": {"num_of_threads": "1"}}
"""Options of sessions, so that what runs beside disturbs less."""
_HERE = pathlib.Path(__file__).parent
_LEAST, _MOST = 7, 51
_AGAIN = 4
"""So much longer is timed what seemed slower than its export."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """How exports are measured.

    Attributes:
        ep: The execution provider.
        limit: Seconds that writing a model may take.
        seconds: Of timing; at least 7 pairs.
        cases: Only so many cases of inputs of each model, the first; None: all.
        choices: Further options of `optimize`.
    """

    ep: str
    limit: float
    seconds: float
    cases: int | None
    choices: Mapping[str, Any]

    def row(self, model: pathlib.Path, writer: Worker, runner: Child, longer: int = 1) -> Row:
        """The row of one export, timed for so many times as long."""
        name = name_of(model)
        with tempfile.TemporaryDirectory() as folder:
            task = {"model": str(model), "ep": self.ep, "out": folder, "choices": self.choices, "most": self.cases}
            try:
                wrote = writer.ask(task, self.limit)
            except ProcessDied as died:
                return Row(name, lost=f"writing it: {died}")
            if "error" in wrote:
                return Row(name, lost=wrote["error"])
            times = {"seconds": self.seconds * longer, "least": _LEAST, "most": _MOST * longer}
            timing = times if self.ep not in EMULATED else dict.fromkeys(times, 0)
            task = {"cases": wrote["cases"], "sizes": wrote["sizes"], "out": folder, **timing}
            answer = _ran(task, {"export": str(model), "ours": wrote["ours"]}, runner)
            return judged(name, wrote, answer, ATTENTION, narrow=providers.provider(self.ep).computes_in_float16)


def _ran(task: Mapping[str, Any], models: Mapping[str, str], runner: Child) -> dict[str, Any]:
    """What models gave; each by itself where the process died of one."""
    try:
        return runner.ask({**task, "models": models})
    except ProcessDied as died:
        if len(models) == 1:
            return {name: {"error": str(died)} for name in models}
    return {key: found for name, path in models.items() for key, found in _ran(task, {name: path}, runner).items()}


def chosen(folders: Sequence[pathlib.Path], only: str) -> list[pathlib.Path]:
    """The exports that are measured.

    Args:
        folders: Where they lie, each with its inputs beside it.
        only: Beginnings of their names, with commas between; empty: all.
    """
    found = sorted((path for folder in folders for path in folder.glob("*.onnx")), key=name_of)
    return [path for path in found if path.with_suffix(".npz").exists() and path.stem.startswith(tuple(only.split(",")))]


def name_of(model: pathlib.Path) -> str:
    """The name of an export in the table: its folder's, and its own."""
    return f"{model.parent.name}/{model.stem}"


@click.command(context_settings={"show_default": True})
@click.argument("folders", nargs=-1, required=True, type=pathlib.Path)
@click.option("--ep", required=True, help="The provider: openvino, qnn, webgpu, wasm, cpu.")
@click.option("--python", default=sys.executable, help="Interpreter of the environment that has the provider.")
@click.option("--web", default=str(_HERE.parent / "tests/providers/web"), help="Folder whose node_modules has onnxruntime-web.")
@click.option("--only", default="", help="Beginnings of names, with commas between.")
@click.option("--seconds", default=120.0, help="Limit for one model in each process.")
@click.option("--time", default=1.0, help="Seconds of timing; at least 7 pairs.")
@click.option("--jobs", default=1, help="Models at a time.")
@click.option("--cases", type=int, help="Only so many cases of inputs of each model, the first.")
@click.option("--choices", type=json.loads, default="{}", help="Further options of optimize, as JSON.")
@click.option("--to", type=pathlib.Path, help="The page, written after each row.")
@click.pass_context
def main(context: click.Context, folders: tuple[pathlib.Path, ...], ep: str, only: str, jobs: int, **given: Any) -> None:
    """Measures exports; the exit status is 1 where something breaks what is claimed."""
    bench = Bench(ep, given["seconds"], given["time"], given["cases"], given["choices"])
    command = [given["python"], "-m", "benchmarks.on_providers.runner", ep, json.dumps(OPTIONS.get(ep, {}))]
    if ep == "wasm":
        command = ["node", str(_HERE / "on_providers" / "runner.js"), given["web"]]
    words = [*(folder.name for folder in folders), "--ep", ep]
    words += [part for key in ("cases", "only") if (value := {"only": only, **given}[key]) for part in (f"--{key}", str(value))]
    free: SimpleQueue[tuple[Worker, Child]] = SimpleQueue()
    rows: list[Row] = []

    def measured(model: pathlib.Path, longer: int = 1) -> Row:
        pair = free.get()
        try:
            return bench.row(model, *pair, longer)
        finally:
            free.put(pair)

    def keep(place: int, row: Row) -> None:
        rows[place : place + 1] = [row]
        problems = row.problems(emulated=ep in EMULATED)
        click.echo(f"[{place + 1}] {row.name}: {row.lost or '; '.join(problems) or 'good'}")
        if given["to"] is not None:
            given["to"].write_text(page(ep, versions, rows, words), encoding="utf-8")

    with contextlib.ExitStack() as ending, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            writer = Worker(["-m", "benchmarks.on_providers.writer"])
            runner = Child(command, seconds=given["seconds"], environment={"PYTHONPATH": str(_HERE.parent)})
            versions = ending.enter_context(runner).ask({})["versions"]
            free.put((ending.enter_context(writer), runner))
        models = chosen(folders, only)
        for place, row in enumerate(pool.map(measured, models)):
            keep(place, row)
        for place, model in enumerate(models):  # by itself and for longer
            if rows[place].slower:
                keep(place, measured(model, _AGAIN))
    context.exit(int(any(row.problems(emulated=ep in EMULATED) for row in rows)))


if __name__ == "__main__":
    main()
