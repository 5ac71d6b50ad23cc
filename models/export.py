"""Builds the zoo: ``python -m models.export --out FOLDER [--only bert,llama] [--jobs 2]``.

Every export runs in a process of its own with a time limit, so that one that crashes or
hangs costs only itself. Files that are already there are kept. The outcome of every export,
failures with their reason included, is a line of ``exports.jsonl`` in the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import bundle
from models.isolate import Crash, call
from models.references import file_name

if TYPE_CHECKING:
    from models.recipe import Recipe

LOG = "exports.jsonl"
EXPORTERS, HALF_EXPORTERS = ("dyn18", "dyn23", "ts17"), ("dyn18", "ts17")
"""Dynamo or TorchScript, each with an opset; and those of half precision."""
SLOW_IMPORTS = ("models.exporters", "models.recipes")


@dataclass(frozen=True)
class Job:
    """One export to make."""

    recipe: str
    exporter: str
    attention: str
    dtype: str

    @property
    def name(self) -> str:
        """Name of the files, without suffix."""
        return file_name(self.recipe, self.exporter, self.attention, self.dtype)


def jobs(
    only: Iterable[str] = (), exporters: Iterable[str] = EXPORTERS, recipes: Iterable[Recipe] | None = None
) -> Iterator[Job]:
    """Yields all exports of some recipes, by default the zoo's, or of the families and names in `only` if any are given.

    Half precision is exported with those exporters only that `HALF_EXPORTERS` has.
    """
    if recipes is None:
        from models.recipes import RECIPES

        recipes = RECIPES.values()
    wanted, exporters = set(only), tuple(exporters)
    for recipe in recipes:
        for dtype in recipe.dtypes:
            for exporter in exporters if dtype == "fp32" else (tag for tag in exporters if tag in HALF_EXPORTERS):
                for attention in recipe.attentions:
                    job = Job(recipe.name, exporter, attention, dtype)
                    if not wanted or wanted & {recipe.name, job.name}:
                        yield job


def run(job: Job, folder: Path, seconds: float) -> dict[str, Any]:
    """Makes one export in a process of its own.

    Args:
        job: What to export.
        folder: Where the files go.
        seconds: The time limit.

    Returns:
        The record for the log; a crash or a time-out is a failure like any other.
    """
    started = time.perf_counter()
    record = call(_export, job, folder, seconds=seconds, preload=SLOW_IMPORTS)
    if isinstance(record, Crash):
        (folder / f"{job.name}.onnx").unlink(missing_ok=True)
        taken = round(time.perf_counter() - started, 2)
        return {"name": job.name, "seconds": taken, "reason": record.reason, "status": "failed"}
    return record


def _export(job: Job, folder: Path) -> dict[str, Any]:
    """Runs in the process of one export."""
    import torch

    from models.exporters import export
    from models.recipes import RECIPES

    torch.set_num_threads(1)
    result = export(RECIPES[job.recipe], job.exporter, job.attention, job.dtype, folder)
    return asdict(result)


def build(wanted: list[Job], folder: Path, *, workers: int, seconds: float, again: bool = False) -> list[dict[str, Any]]:
    """Makes all exports that are missing, prints a line for each and keeps the log.

    Args:
        wanted: The exports.
        folder: Where the files go.
        workers: How many at a time.
        seconds: The time limit of one.
        again: Whether to make those that are there, too.

    Returns:
        The records of all wanted exports, the ones made earlier included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG
    known = _known(log)
    missing = [job for job in wanted if again or not _there(job, folder, known)]
    with ThreadPoolExecutor(workers) as pool:
        for record in pool.map(lambda job: run(job, folder, seconds), missing):
            known[record["name"]] = record
            print(_line(record), flush=True)
            _save(log, known)
    return [known[job.name] for job in wanted]


def _there(job: Job, folder: Path, known: dict[str, dict[str, Any]]) -> bool:
    files = all((folder / f"{job.name}.{suffix}").exists() for suffix in ("onnx", "npz"))
    return files and known.get(job.name, {}).get("status") == "ok"


def _known(log: Path) -> dict[str, dict[str, Any]]:
    if not log.exists():
        return {}
    records = (json.loads(line) for line in log.read_text().splitlines())
    return {record["name"]: record for record in records}


def _save(log: Path, known: dict[str, dict[str, Any]]) -> None:
    lines = [json.dumps(record) for _, record in sorted(known.items())]
    part = log.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n")
    part.replace(log)


def _line(record: dict[str, Any]) -> str:
    text = record.get("reason") or record.get("note") or ",".join(record.get("dynamic", ()))
    return f"{record['status']:6}  {record['seconds']:6.1f} s  {record['name']:44}  {text}"


def summary(records: list[dict[str, Any]]) -> str:
    """Returns the closing lines: counts, and every failure with its reason."""
    failed = [record for record in records if record["status"] != "ok"]
    partly = [record for record in records if record.get("note")]
    lines = [
        f"{len(records)} exports: {len(records) - len(failed)} written "
        f"({len(partly)} with fewer dynamic axes), {len(failed)} failed"
    ]
    return "\n".join(lines + [f"  {record['name']}: {record['reason']}" for record in failed])


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit code is 0 even if single exports fail."""
    parser = argparse.ArgumentParser(prog="python -m models.export", description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder for the exports")
    target.add_argument("--bundled", action="store_true", help="make models/bundled again")
    parser.add_argument("--only", default="", help="families or export names, with commas")
    parser.add_argument("--exporters", default=",".join(EXPORTERS), help="dyn or ts with an opset each, with commas")
    parser.add_argument("--every", type=int, default=1, help="make the first of every so many of these")
    parser.add_argument("--jobs", type=int, default=2, help="exports at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one export")
    options = parser.parse_args(arguments)
    only = bundle.NAMES if options.bundled else tuple(filter(None, options.only.split(",")))
    wanted = list(jobs(only, options.exporters.split(",")))[:: options.every]
    if not wanted:
        parser.error(f"nothing is called {options.only}")
    started = time.perf_counter()
    folder = bundle.FOLDER if options.bundled else options.out
    records = build(wanted, folder, workers=options.jobs, seconds=options.timeout, again=options.bundled)
    for record in records:
        if options.bundled and record["status"] == "ok":
            bundle.slim(record["name"])
    print(summary(records))
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
