"""The measurements of `whole_models_on_gpu.py` as Markdown.

python benchmarks/whole_model_tables.py FILE.json ... > TABLE.md
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from onnx_attnfuse.bench.roofline import Limit, Work, limit
from onnx_attnfuse.kernels.limits import limits_of

Cells = dict[tuple[str, str], dict[str, dict[str, Any]]]
"""What was measured, by model and case, then by variant; of two measurements the later."""
_TORCH = ("eager", "compile", "reduce-overhead")
_NAMES = {"plain": "export", "eager": "torch", "compile": "torch.compile", "reduce-overhead": "torch.compile, graphs"}


def gathered(found: list[dict[str, Any]]) -> tuple[Cells, list[str], list[str]]:
    """The cells, the variants in the order of the table, and what went wrong."""
    cells: Cells = {}
    seen: dict[str, None] = {}
    wrong: dict[str, dict[str, None]] = {}
    for cell in (cell for file in found for cell in file["cells"]):
        if "error" in cell:
            where = f"{cell['name']}, {cell.get('case', 'all cases')}, {_NAMES.get(cell['variant'], cell['variant'])}"
            wrong.setdefault(cell["error"][:200], {})[where] = None
            continue
        seen[cell["variant"]] = None
        cells.setdefault((cell["name"], cell["case"]), {})[cell["variant"]] = cell
    for made in (made for file in found for made in file["made"] if "error" in made):
        wrong.setdefault(made["error"][:200], {})[f"{made['name']}, {made['variant']} (making it)"] = None
    columns = [label for label in seen if label not in _TORCH] + [label for label in _TORCH if label in seen]
    return cells, columns, [f"- {error}: {'; '.join(places)}" for error, places in wrong.items()]


def table(
    cells: Cells, columns: list[str], value: Callable[[dict[str, Any]], str], more: Callable[..., list[str]], *heads: str
) -> str:
    """One table: a row per model and case, a column per variant, and what `more` says of the row."""
    names = [_NAMES.get(label, label) for label in columns]
    lines = ["| " + " | ".join(["model", "case", *names, *heads]) + " |", "|---" * (2 + len(names) + len(heads)) + "|"]
    for (name, case), found in cells.items():
        words = [value(found[label]) if label in found else "" for label in columns]
        lines.append("| " + " | ".join([name, case, *words, *more(found)]) + " |")
    return "\n".join(lines)


def ratios(found: dict[str, dict[str, Any]]) -> list[str]:
    """The fastest of ours and which it is, against the export, and against the fastest of all others."""
    times = {label: cell["ms"] for label, cell in found.items()}
    ours = {label: ms for label, ms in times.items() if label.startswith("ours")}
    others = {label: ms for label, ms in times.items() if not label.startswith("ours")}
    if not ours or not others:
        return ["", "", "", ""]
    best = min(others, key=lambda label: others[label])
    mine = min(ours, key=lambda label: ours[label])
    plain = f"{times['plain'] / ours[mine]:.2f}" if "plain" in times else ""
    return [mine, plain, f"{others[best] / ours[mine]:.2f}", _NAMES.get(best, best)]


def least(found: list[dict[str, Any]]) -> dict[tuple[str, str], Limit]:
    """The least time that the GPU takes for each model and case, from the variant that does least; where its limits are known."""
    limits: dict[tuple[str, str], Limit] = {}
    for file in found:
        device = limits_of(file["machine"].get("gpu", "").partition(",")[0])
        for made in file["made"] if device else ():
            for case, done in made.get("work", {}).items():
                mine = limit(Work(**done), device)
                before = limits.setdefault((made["name"], case), mine)
                limits[made["name"], case] = min(before, mine, key=lambda item: item.ms)
    return limits


def shares(cells: Cells, limits: dict[tuple[str, str], Limit]) -> str:
    """A table of limits, and of how much of them each variant reaches, in percent."""
    variants = list(dict.fromkeys(label for found in cells.values() for label in found))
    names = [_NAMES.get(label, label) for label in variants]
    lines = ["| " + " | ".join(["model", "case", "limit, ms", "by", *names]) + " |", "|---" * (4 + len(names)) + "|"]
    for (name, case), found in cells.items():
        if (bound := limits.get((name, case))) is None:
            continue
        words = [f"{100 * bound.ms / found[label]['ms']:.0f}" if label in found else "" for label in variants]
        lines.append("| " + " | ".join([name, case, f"{bound.ms:.3g}", bound.by, *words]) + " |")
    return "\n".join(lines)


def apart(cell: dict[str, Any]) -> str:
    """The largest and the mean difference from the export's result, and how many numbers are not finite."""
    if cell.get("difference") is None:
        return "another shape" if "difference" in cell else ""
    return f"{cell['difference']:.0e} ({cell['mean']:.0e})" + (f", {cell['not finite']} not finite" if cell["not finite"] else "")


def main() -> None:
    """Prints the tables."""
    found = [json.loads(pathlib.Path(name).read_text()) for name in sys.argv[1:]]
    cells, columns, wrong = gathered(found)
    machine = {key: value for file in found for key, value in file["machine"].items()}
    print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n")
    heads = ("fastest of ours", "export / it", "best other / it", "best other")
    print("Milliseconds per run of the model, the median.\n")
    print(table(cells, columns, lambda cell: f"{cell['ms']:.3g}", ratios, *heads))
    if limits := least(found):
        print("\nThe least time for all bytes and products (limit), and how many percent of a run it is.\n")
        print(shares(cells, limits))
    print("\nMB taken from the GPU.\n")
    print(table(cells, columns, lambda cell: f"{cell['megabytes']:.0f}", lambda found: []))
    results = [label for label in columns if label not in _TORCH]
    largest = [f"{found['plain']['largest']:.2g}" if "plain" in found else "" for found in cells.values()]
    rest = iter(largest)
    print("\nLargest (mean) difference from the export's first result, where tokens count.\n")
    print(table(cells, results, apart, lambda found: [next(rest)], "largest number"))
    if wrong:
        print("\nNot measured:\n")
        print("\n".join(wrong))


if __name__ == "__main__":
    main()
