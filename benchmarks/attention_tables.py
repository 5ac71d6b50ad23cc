"""The measurements of `attention_on_gpu.py` as a Markdown table.

python benchmarks/attention_tables.py FILE.json ... > TABLE.md
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

_COLUMNS = ("unfused", "onnxscript", "ours", "any size", "exact", "assumed")
_NAMES = {"right": "right padding", "left": "left padding", "full": "no padding in it"}


def row(cell: dict[str, Any]) -> str:
    """One line of the table."""
    kind, heads, dtype = cell["name"].split("-")
    batch, length = cell["size"][:2]
    times = cell["ms"]
    torch_times = {name: value for name, value in times.items() if name.startswith("torch")}
    best = min(torch_times, key=lambda name: torch_times[name], default=None)
    ran, forecast = cell.get("ran", {}), cell.get("expected", {})
    wrong = [
        label
        for label, kernels in ran.items()
        if kernels not in ([forecast[label]], [] if forecast[label] == "unfused" else None)
    ]
    words = [
        f"{kind.replace('_', ' + ')}{', ' + _NAMES[cell['pattern']] if cell['pattern'] else ''}",
        dtype,
        f"{batch}, {length}, {heads}",
        *(f"{times[name]:.3f}" if name in times else "" for name in _COLUMNS),
        "" if best is None else f"{torch_times[best]:.3f} ({best.removeprefix('torch ')})",
        f"{forecast.get('ours', '')}{' (not what ran)' if wrong else ''}",
        f"{max(cell['error'].get(label, 0.0) for label in ('ours', 'any size', 'exact', 'assumed')):.0e}",
    ]
    return f"| {' | '.join(words)} |"


def main() -> None:
    """Prints all cells."""
    cells = [cell for name in sys.argv[1:] for cell in json.loads(pathlib.Path(name).read_text())]
    print("| mask | type | b, s, n x h |", " | ".join(_COLUMNS), "| torch's best | forecast and ran | our error |")
    print("|" + "---|" * (len(_COLUMNS) + 6))
    for cell in cells:
        print(f"| {cell['name']} | {cell['size']} | {cell['broken'][:60]} |" if "broken" in cell else row(cell))


if __name__ == "__main__":
    main()
