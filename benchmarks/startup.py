"""What a run of the command costs besides fusing: ``python benchmarks/startup.py [--before CHECKOUT] [--repeats N]``.

CPU seconds (user and system, children included) of `attnfuse optimize` on a small model, the least of several runs, which take
turns with those of another checkout; then what is imported, by package. Modules are compiled once, in a folder for both.
Writes `results/startup.md`.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import table

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "models" / "bundled" / "bert__dyn18__sdpa.onnx"
LEVELS = ("none", "sites")
_LINE = re.compile(r"import time:\s*(\d+) \|\s*\d+ \|\s*(\w+)", re.ASCII)
_OWN = "onnx_attnfuse"


def ran(root: Path, folder: Path, level: str, *flags: str) -> tuple[float, str]:
    """CPU seconds of one run of the command of a checkout, and what it says on stderr."""
    parts = [str(root / part) for part in ("", "patterns", "cli")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *flags, "-m", "onnx_attnfuse_cli", "optimize", str(MODEL), "--verify", level]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "-o", str(folder / "fused.onnx")], check=True, capture_output=True, text=True, cwd=folder, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def imported(root: Path, folder: Path, repeats: int) -> tuple[Mapping[str, float], Mapping[str, int]]:
    """Seconds that the modules of each package take, the least of several runs, and how many there are."""
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for _ in range(repeats):
        found: Counter[str] = Counter()
        counts.clear()
        for taken, package in _LINE.findall(ran(root, folder, "none", "-X", "importtime")[1]):
            name = _OWN if package.startswith(_OWN) else package
            found[name] += int(taken)
            counts[name] += 1
        seconds = {name: min(taken / 1e6, seconds.get(name, float("inf"))) for name, taken in found.items()}
    return seconds, counts


def tables(roots: Mapping[str, Path], folder: Path, repeats: int) -> list[str]:
    """Lines of Markdown: whole runs, then imports, of one checkout or two."""
    least: dict[tuple[str, str], float] = {}
    for root in roots.values():
        ran(root, folder, "sites")  # compiles
    for _ in range(repeats):
        for level in LEVELS:
            for name, root in roots.items():
                least[name, level] = min(ran(root, folder, level)[0], least.get((name, level), float("inf")))
    rows = [[f"`--verify {level}`", *(f"{least[name, level]:.2f}" for name in roots)] for level in LEVELS]
    both = [imported(root, folder, repeats) for root in roots.values()]
    most = Counter[str]()
    for seconds, _ in both:
        most |= Counter(seconds)
    modules = [
        [name, *(f"{taken[name] * 1e3:.0f} ({counts[name]})" if name in taken else "—" for taken, counts in both)]
        for name, seconds in most.most_common()
        if seconds > 0.004
    ]
    return [table(["CPU seconds", *roots], rows), "", table(["import, `--verify none`: ms (modules)", *roots], modules)]


def main() -> None:
    """Measures, and writes the tables between what is said by hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    roots = {"before": chosen.before.resolve()} if chosen.before else {}
    with tempfile.TemporaryDirectory() as folder:
        lines = tables({**roots, "now": HERE.parent}, Path(folder), chosen.repeats)
    path = HERE / "results" / "startup.md"
    head, _, tail = path.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    _, _, tail = tail.partition("<!-- end of tables -->\n")
    path.write_text(f"{head}<!-- tables -->\n" + "\n".join(lines) + f"\n<!-- end of tables -->\n{tail}", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
