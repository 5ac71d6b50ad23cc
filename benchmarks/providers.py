"""Many models on an execution provider, each export beside what is written for it.

    python -m benchmarks.providers --ep NAME FOLDER ...

Each folder has exports and, beside each, an archive of its inputs by case. `make providers` does it for all that runs on a Linux
machine without a GPU.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from benchmarks.on_providers.children import LATE, Child
from benchmarks.on_providers.judge import EMULATED, Row, judged
from benchmarks.on_providers.kept import Kept, digest, runners
from benchmarks.on_providers.tables import page
from benchmarks.on_providers.writer import ATTENTION
from onnx_attnfuse.bench.process import ChildError
from onnx_attnfuse.kernels import providers

OPTIONS = {"openvino": {"num_of_threads": "1"}}
"""Options of sessions, so that what runs beside disturbs less."""
_WRITER = "benchmarks.on_providers.writer"
_LEAST, _MOST = 7, 51
_AGAIN = 4
"""So much longer is timed what seemed slower than its export."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two processes that look at one model after another."""

    writer: Child
    runner: Child


def main() -> int:
    """Runs the command; 1 where something breaks what is claimed."""
    options = _parser().parse_args()
    models = chosen(options.folders, options.only)
    kept = Kept(options.cache or pathlib.Path("build", "providers", f"{options.ep}.jsonl"))
    pairs = [_pair(options) for _ in range(options.jobs)]
    try:
        bench = Bench(options, pairs, kept)
        bench.all_of(models)
    finally:
        for pair in pairs:
            pair.writer.end()
            pair.runner.end()
    rows = [kept.rows[name_of(model)] for model in models]
    if options.to is not None:
        options.to.write_text(page(options.ep, bench.versions, rows, _words(options)), encoding="utf-8")
        print(f"wrote {options.to}")
    return 1 if any(row.problems(emulated=options.ep in EMULATED) for row in rows) else 0


class Bench:
    """Models in pairs of processes, and the rows that are kept."""

    def __init__(self, options: argparse.Namespace, pairs: Sequence[Pair], kept: Kept) -> None:
        """A bench; the first runner is asked for its packages.

        Args:
            options: The command line.
            pairs: Processes, as many as models are looked at at a time.
            kept: Rows so far.
        """
        self._options, self._pairs, self._kept = options, pairs, kept
        self.versions: dict[str, str] = pairs[0].runner.ask({})["versions"]
        self._runs = digest((options.ep, self.versions, OPTIONS.get(options.ep, {}), options.cases), runners())

    def all_of(self, models: Sequence[pathlib.Path]) -> None:
        """Rows of all models; what seemed slower than its export is timed a second time, by itself and for longer."""
        free: SimpleQueue[Pair] = SimpleQueue()
        for pair in self._pairs:
            free.put(pair)
        anew: list[pathlib.Path] = []

        def one(model: pathlib.Path) -> None:
            pair = free.get()
            try:
                row = self._measured(model, pair)
            finally:
                free.put(pair)
            if row.run != self._before(model).run or not row.run or self._options.fresh:
                anew.append(model)
            self._keep(row)

        with ThreadPoolExecutor(len(self._pairs)) as pool:
            for future in [pool.submit(one, model) for model in models]:
                future.result()
        for model in anew if self._timed else ():
            if self._before(model).slower:
                self._keep(self._measured(model, self._pairs[0], again=True))

    @property
    def _timed(self) -> bool:
        return self._options.ep not in EMULATED

    def _before(self, model: pathlib.Path) -> Row:
        return self._kept.rows.get(name_of(model), Row(name_of(model)))

    def _keep(self, row: Row) -> None:
        self._kept.add(row)
        problems = row.problems(emulated=not self._timed)
        print(f"[{len(self._kept.rows)}] {row.name}: {row.lost or '; '.join(problems) or 'good'}", flush=True)

    def _measured(self, model: pathlib.Path, pair: Pair, *, again: bool = False) -> Row:
        """The row of one export; that of an earlier run where what is written is what was written then."""
        options, name = self._options, name_of(model)
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrote = pair.writer.ask(
                    {"model": str(model), "ep": options.ep, "out": folder, "choices": options.choices, "most": options.cases}
                )
            except ChildError as died:
                return Row(name, lost=f"writing it: {died}")
            if "error" in wrote:
                return Row(name, lost=wrote["error"])
            before = self._before(model)
            names = [case["name"] for case in wrote["cases"]]
            run = digest([self._runs, wrote["sizes"], names], [model, model.with_suffix(".npz"), pathlib.Path(wrote["ours"])])
            if before.run == run and not again and not options.fresh:
                return dataclasses.replace(before, **{key: wrote[key] for key in ("sites", "operators", "left")})
            long = {"seconds": options.time * (_AGAIN if again else 1), "least": _LEAST, "most": _MOST * (_AGAIN if again else 1)}
            timing = long if self._timed else {"seconds": 0, "least": 0, "most": 0}
            task = {"cases": wrote["cases"], "sizes": wrote["sizes"], "out": folder, **timing}
            answer = _ran(task, {"export": str(model), "ours": wrote["ours"]}, pair.runner)
            found = judged(name, wrote, answer, ATTENTION, narrow=providers.provider(options.ep).computes_in_float16)
            late = any(LATE in side.failed for side in (found.export, found.ours))
            return found if late else dataclasses.replace(found, run=run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="FOLDER", help="exports, and .npz beside them")
    parser.add_argument("--ep", required=True, help="provider: openvino, qnn, webgpu, wasm, cpu")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment that has the provider")
    parser.add_argument("--web", type=pathlib.Path, help="folder whose node_modules has onnxruntime-web, for wasm")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for one model in each process")
    parser.add_argument("--time", type=float, default=1.0, help="seconds of timing; at least 7 pairs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cases", type=int, help="only so many cases of inputs of each model, the first")
    parser.add_argument("--choices", type=json.loads, default={}, help="further options of optimize, as JSON")
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what an earlier run left in the cache, even if it still holds"
    )
    parser.add_argument("--cache", type=pathlib.Path, help="rows so far  [build/providers/EP.jsonl]")
    parser.add_argument("--to", type=pathlib.Path, metavar="OUT.md")
    return parser


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


def _pair(options: argparse.Namespace) -> Pair:
    here = pathlib.Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), *(path for path in sys.path if path and "site-packages" not in path)])
    environment = {"PYTHONPATH": paths}
    writer = Child([sys.executable, "-m", _WRITER], seconds=options.seconds, environment=environment)
    if options.ep == "wasm":
        command = [
            "node",
            str(here / "on_providers" / "runner.js"),
            str(options.web or here.parent / "tests" / "providers" / "web"),
        ]
    else:
        command = [options.python, "-m", "benchmarks.on_providers.runner", options.ep, json.dumps(OPTIONS.get(options.ep, {}))]
    return Pair(writer, Child(command, seconds=options.seconds, environment={"PYTHONPATH": str(here.parent)}))


def _ran(task: Mapping[str, Any], models: Mapping[str, str], runner: Child) -> dict[str, Any]:
    """What both models gave; each by itself where the process died of one."""
    try:
        return runner.ask({**task, "models": models})
    except ChildError:
        answer: dict[str, Any] = {}
    for name, path in models.items():
        answer |= _alone(task, name, path, runner)
    return answer


def _alone(task: Mapping[str, Any], name: str, path: str, runner: Child) -> dict[str, Any]:
    """What one model gave."""
    try:
        return runner.ask({**task, "models": {name: path}})
    except ChildError as died:
        return {name: {"error": str(died)}}


def _words(options: argparse.Namespace) -> list[str]:
    """The command line without what is of this machine only."""
    some = ["--cases", str(options.cases)] if options.cases else []
    only = ["--only", options.only] if options.only else []
    return [*(folder.name for folder in options.folders), "--ep", options.ep, *some, *only]


if __name__ == "__main__":
    sys.exit(main())
