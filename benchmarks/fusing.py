"""Speed and memory of fusing, beside the other tools: ``python benchmarks/fusing.py [--layers 12,24] [--cap SECONDS]``.

Whole commands are measured, start of the interpreter and imports included, one at a time and taking turns. What each of them
wrote is looked at, too: a tool that does nothing would be the fastest. See the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.decoders import EXPORTERS
from benchmarks.measure import Usage, run
from benchmarks.tables import report
from benchmarks.tools import HERE, OURS, PEERS, Case, Tool, environment

LARGE = Case("dyn", 12, "large")
REPEATS = 3
PEER_REPEATS = 2
SLOW = 20.0
"""Seconds after which a peer is not run a second time."""
MEMORY = 16 * 2**30
"""Bytes that a command may allocate; one that wants more fails."""


def build(case: Case, cache: Path) -> Path:
    """The model of a case, exported once and kept in a folder of its own."""
    path = cache / case.name / "model.onnx"
    if not path.exists():
        print(f"exporting {case.name}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = [case.exporter, str(case.layers), case.size, str(path)]
        subprocess.run([sys.executable, str(HERE / "decoders.py"), *arguments], check=True, capture_output=True)
    return path


def warm(model: Path, folder: Path) -> None:
    """Runs every tool once, unmeasured, so that none pays for compiling its modules."""
    case = Case("dyn", 1, "small")  # what it is makes no difference here
    for tool in (OURS, *PEERS):
        run(tool.command(case, model, folder / "warm.onnx"), folder, cap=120, memory=MEMORY)


def measured(case: Case, model: Path, cap: float) -> list[dict[str, Any]]:
    """Runs all tools on one model, taking turns.

    Outputs are written beside the model, because that is where its weights are, and deleted.

    Args:
        case: What the model is.
        model: Its file.
        cap: Seconds for one run of another tool.

    Returns:
        A record for each tool.
    """
    tools = (OURS, *PEERS)
    runs: dict[str, list[Usage]] = {tool.name: [] for tool in tools}
    outputs = {tool.name: model.with_name(f"output_{index}.onnx") for index, tool in enumerate(tools)}
    for turn in range(REPEATS):
        for tool in tools:
            if tool is not OURS and not _again(runs[tool.name], turn):
                continue
            with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
                usage = run(tool.command(case, model, outputs[tool.name]), Path(scratch), cap=cap, memory=MEMORY)
            runs[tool.name].append(usage)
            print(f"{case.name:24}  {tool.name:18}  {usage.wall:7.1f} s  {usage.cpu:7.1f} s CPU  {usage.status}", flush=True)
    return [_record(tool, runs[tool.name], _outcome(case, model, outputs[tool.name])) for tool in tools]


def _again(runs: list[Usage], turn: int) -> bool:
    return turn < PEER_REPEATS and all(usage.status == "ok" and usage.wall < SLOW for usage in runs)


def _record(tool: Tool, runs: list[Usage], outcome: dict[str, Any]) -> dict[str, Any]:
    """The medians of a tool's runs; the lower one of two."""
    medians = {key: statistics.median_low(getattr(usage, key) for usage in runs) for key in ("wall", "cpu", "rss")}
    return {
        "tool": tool.name,
        "status": runs[0].status,
        "runs": len(runs),
        **{key: round(value, 3) for key, value in medians.items()},
        **({"note": runs[0].note} if runs[0].note else {}),
        **(outcome if runs[0].status == "ok" else {}),
    }


def _outcome(case: Case, model: Path, output: Path) -> dict[str, Any]:
    """What `benchmarks/outcome.py` says of a file; it is deleted afterwards with the data written beside it."""
    how = ["--load-only"] if case.size == "large" else []
    command = [sys.executable, str(HERE / "outcome.py"), str(model), str(output), *how]
    answer = subprocess.run(command, check=False, capture_output=True, text=True) if output.exists() else None
    for file in output.parent.glob(f"{output.name}*"):
        file.unlink()
    if answer is None:
        return {}
    if answer.returncode:
        return {"loads": False, "error": f"the check ended with exit code {answer.returncode}"}
    return json.loads(answer.stdout)


def compare(cases: list[Case], cache: Path, out: Path, cap: float) -> dict[str, Any]:
    """Measures all cases and writes the results after each, so that an interrupted run leaves what it has.

    Args:
        cases: The models.
        cache: Where exports are kept.
        out: Where the results go.
        cap: Seconds for one run of another tool.

    Returns:
        What was written as JSON.
    """
    models = {case: build(case, cache) for case in cases}
    commands = {tool.name: tool.shown for tool in (OURS, *PEERS)}
    results: dict[str, Any] = {"environment": environment(), "cap": cap, "commands": commands, "cases": []}
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        warm(min(models.values(), key=lambda path: path.stat().st_size), Path(scratch))
    for case, model in models.items():
        tools = measured(case, model, cap)
        size = sum(file.stat().st_size for file in model.parent.glob("model.onnx*"))
        results["cases"].append({**vars(case), "name": case.name, "bytes": size, "tools": tools})
        (out / "fusing.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        (out / "fusing.md").write_text(report(results))
    return results


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="12,24,48,96", help="depths of the small decoders, with commas; may be empty")
    parser.add_argument("--cap", type=float, default=400, help="seconds for one run of another tool")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build" / "benchmarks", help="where exports are kept")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where the results go")
    options = parser.parse_args()
    depths = [int(text) for text in options.layers.split(",") if text]
    cases = [Case(exporter, layers, "small") for layers in depths for exporter in EXPORTERS]
    for folder in (options.cache, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.cache).free < 10e9:
        parser.error("the outputs for the large model need 10 GB of disk; give another --cache")
    results = compare([*cases, LARGE], options.cache.absolute(), options.out, options.cap)
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
