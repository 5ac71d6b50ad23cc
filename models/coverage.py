"""The coverage table: ``python -m models.coverage FOLDER [--only bert] [--jobs 2] [--json OUT]``.

For every export in the folder it runs ``attnfuse optimize``, then compares the fused model
with the export and with the torch outputs beside it, under every mask and size. The exit code
is 1 if a fused model is wrong or anything crashed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models.compare import Comparison, compare
from models.isolate import Crash, call

COMMAND = "attnfuse optimize {m} -o {o} --ep cpu --report {r} -q"


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: Name of the export, without suffix.
        fused: Sites that are fused now or were before; None without a report.
        sites: All attention sites; None without a report.
        masks: What the masks were recognised as.
        reasons: Why sites stayed, as ``code: message``, with their number.
        comparison: The numeric checks; None if the command crashed.
        crash: Why there is no result; empty if there is one.
        seconds: Time the command took.
    """

    name: str
    fused: int | None = None
    sites: int | None = None
    masks: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    comparison: Comparison | None = None
    crash: str = ""
    seconds: float = 0.0

    @property
    def family(self) -> str:
        """The name of the recipe."""
        return self.name.split("__")[0]

    @property
    def column(self) -> str:
        """Exporter, attention implementation and element type."""
        return " ".join(self.name.split("__")[1:])

    @property
    def dtype(self) -> str:
        """The element type."""
        return (self.name.split("__")[3:] or ["fp32"])[0]

    @property
    def good(self) -> bool:
        """Whether nothing crashed and nothing is wrong."""
        return not self.crash and self.comparison is not None and not self.comparison.wrong

    @property
    def count(self) -> str:
        """Sites fused over sites."""
        return "?" if self.sites is None else f"{self.fused}/{self.sites}"


def measure(export: Path, command: str, seconds: float) -> Row:
    """Runs the command on one export and checks the result.

    Args:
        export: The ``.onnx`` file; the ``.npz`` lies beside it.
        command: The command line with ``{m}``, ``{o}`` and ``{r}`` for the model, the
            fused model and the report.
        seconds: Time limit of the command and of the checks.
    """
    row = Row(export.stem)
    with tempfile.TemporaryDirectory() as scratch:
        fused, report = Path(scratch, "fused.onnx"), Path(scratch, "report.json")
        started = time.perf_counter()
        row.crash = _run(command, {"m": export, "o": fused, "r": report}, seconds)
        row.seconds = round(time.perf_counter() - started, 2)
        if report.exists():
            count(json.loads(report.read_text()), row)
        if not row.crash and not fused.exists():
            row.crash = "the command wrote no model"
        if row.crash:
            return row
        references = export.with_suffix(".npz")
        result = call(compare, export, fused, references, row.dtype, seconds=seconds, preload=("models.compare",))
    if isinstance(result, Crash):
        row.crash = f"the comparison: {result.reason}"
    else:
        row.comparison = result
    return row


def _run(command: str, paths: dict[str, Path], seconds: float) -> str:
    """Runs the command; returns what went wrong, or nothing."""
    words = [word.format(**paths) for word in shlex.split(command)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"the command timed out after {seconds:.0f} s"
    except OSError as error:
        return f"the command does not start: {error}"
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines() or [""]
    return f"the command ended with exit code {done.returncode}: {said[-1][:200]}"


def count(report: dict[str, Any], row: Row) -> None:
    """Adds the counts and reasons of a report to a row.

    A site that is not attention is not a site of the table.
    """
    sites = [site for site in report["sites"] if site["status"] != "not-attention"]
    row.sites = len(sites)
    row.masks = sorted({site["mask"] or "not read" for site in sites})
    row.fused = sum(site["status"] in ("fused", "already-fused") for site in sites)
    reasons = (
        f"{reason['code']}: {reason['message']}"
        for site in sites
        if site["status"] == "skipped"
        for reason in site["reasons"] or [{"code": "none", "message": "no reason given"}]
    )
    row.reasons = dict(Counter(reasons))


def lines(row: Row) -> Iterator[str]:
    """Yields the lines of the table for one export."""
    result = row.comparison
    compared = result is not None and result.cases > 0
    errors = (
        f"{result.against_export:9.1e} {result.against_torch:9.1e} {result.cases:5}"
        if result and compared
        else f"{'-':>9} {'-':>9} {'-':>5}"
    )
    verdict = "ok" if row.good else "CRASH" if row.crash else "WRONG"
    if row.good and not compared:
        verdict = "not run"
    yield f"{row.family:24} {row.column:18} {row.count:>6} {errors}  {verdict}"
    if row.crash:
        yield f"    {row.crash}"
    for text in result.wrong if result else ():
        yield f"    wrong: {text}"
    for text, number in row.reasons.items():
        yield f"    {number} not fused: {text}"
    for text in result.notes() if result else ():
        yield f"    note: {text}"


def header() -> str:
    """Returns the head of the table."""
    return f"{'family':24} {'export':18} {'sites':>6} {'vs export':>9} {'vs torch':>9} {'cases':>5}  result"


def matrix(rows: Iterable[Row]) -> str:
    """Returns what masks were recognised as, and sites fused over sites, one line per family and one column per export.

    >>> fine = Row("bert__dyn18__sdpa", 2, 2, ["padding"], comparison=Comparison())
    >>> print(matrix([fine, Row("bert__ts17__eager", 1, 2, crash="out of memory")]))
    | family | masks | dyn18 sdpa | ts17 eager |
    |---|---|---|---|
    | bert | padding | 2/2 | 1/2 ! |
    """
    rows = list(rows)
    columns = sorted({row.column for row in rows}, key=lambda column: (column.count(" "), column))
    cells: dict[str, dict[str, str]] = {}
    masks: dict[str, set[str]] = {}
    for row in rows:
        cells.setdefault(row.family, {})[row.column] = row.count + ("" if row.good else " !")
        masks.setdefault(row.family, set()).update(row.masks)
    table = [["family", "masks", *columns], ["---"] * (len(columns) + 2)]
    table += [[family, ", ".join(sorted(masks[family])), *(made.get(at, "") for at in columns)] for family, made in cells.items()]
    text = [f"| {' | '.join(line)} |" for line in table]
    text[1] = text[1].replace(" ", "")
    return "\n".join(text)


def totals(rows: list[Row]) -> str:
    """Returns the closing lines."""
    counted = [row for row in rows if row.sites is not None]
    whole = sum(row.fused == row.sites for row in counted)
    wrong = [row.name for row in rows if not row.good]
    return (
        f"{len(rows)} exports, {sum(row.fused or 0 for row in counted)} of "
        f"{sum(row.sites or 0 for row in counted)} sites fused, "
        f"all sites in {whole} of {len(counted)} exports with a report; "
        f"{len(wrong)} wrong or crashed{': ' if wrong else ''}{', '.join(wrong)}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m models.coverage", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of exports")
    parser.add_argument("--only", default="", help="families or export names, with commas")
    parser.add_argument("--jobs", type=int, default=2, help="exports at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one export")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--cmd", default=COMMAND, help="command line, with {m}, {o} and {r}")
    options = parser.parse_args(arguments)
    only = set(filter(None, options.only.split(",")))
    exports = [path for path in sorted(options.folder.glob("*.onnx")) if not only or only & {path.stem, path.stem.split("__")[0]}]
    if not exports:
        parser.error(f"no such export in {options.folder}")
    rows = []
    print(header())
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda path: measure(path, options.cmd, options.timeout), exports):
            rows.append(row)
            print("\n".join(lines(row)), flush=True)
    print(f"\n{matrix(rows)}\n\n{totals(rows)}")
    if options.json:
        records = [asdict(row) | {"good": row.good} for row in rows]
        options.json.write_text(json.dumps(records, indent=1))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
