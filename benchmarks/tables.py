"""Turns results into Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.decoders import EXPORTERS

OURS = "attnfuse"
_OUTCOME = ("sites fused", "loads", "max. difference")
FASTER = 20
SMALLER = 200
"""What is claimed: times faster than each of the others, and MB on a model of more than 2 GB."""

Record = dict[str, Any]


def report(results: Record) -> str:
    """The whole of `fusing.md`."""
    small = [case for case in results["cases"] if case["size"] == "small"]
    large = [case for case in results["cases"] if case["size"] == "large"]
    parts = [
        "# Fusing: speed and memory",
        "Written by `python benchmarks/fusing.py`; `benchmarks/README.md` says how it is measured. "
        f"Other tools were stopped after {results['cap']:.0f} s.",
        *results.get("notes", ()),
        "## What holds",
        "\n".join(f"- {line}" for line in verdicts(small, large)),
        *(_small_sections(small) if small else ()),
        *(("## Memory, a model of more than 2 GB", *(_memory(case) for case in large)) if large else ()),
        "## What ran",
        _table(("tool", "command"), ((name, f"`{shown}`") for name, shown in results["commands"].items())),
        _table(("what", "which"), results["environment"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def _small_sections(small: Sequence[Record]) -> tuple[str, ...]:
    return (
        "## Speed, small decoders",
        "`×` is how many times as long as attnfuse. A row is in bold where both ratios reach what is claimed.",
        *(_speed(case) for case in small),
        "## Growth",
        "CPU milliseconds for each further layer: the same from column to column where time is linear.",
        _growth(small),
    )


def verdicts(small: Sequence[Record], large: Sequence[Record]) -> list[str]:
    """One line for each claim and tool."""
    names = dict.fromkeys(tool["tool"] for case in small for tool in case["tools"] if tool["tool"] != OURS)
    lines = [_faster(name, [case for case in small if _of(case, name)["status"] != "failed"]) for name in names]
    for case in large:
        ours = _of(case, OURS)
        held = "holds" if ours["rss"] <= SMALLER and ours["status"] == "ok" else "does not hold"
        lines.append(f"At most {SMALLER} MB on a model of {case['bytes'] / 1e9:.2f} GB: {held}, {ours['rss']:.0f} MB.")
    return lines


def _faster(name: str, cases: Sequence[Record]) -> str:
    if not cases:
        return f"At least {FASTER}× faster than {name}: no run of it ended well."
    ratios = {key: [_ratio(case, _of(case, name), key) for case in cases] for key in ("cpu", "wall")}
    held = {key: sum(value >= FASTER for value in values) for key, values in ratios.items()}
    worst, best = (cases[ratios["cpu"].index(pick(ratios["cpu"]))] for pick in (min, max))
    more = "more than " if _of(best, name)["status"] == "capped" else ""
    return (
        f"At least {FASTER}× faster than {name}: holds in {held['cpu']} of {len(cases)} cases by CPU time, in {held['wall']} by "
        f"wall time. CPU time: {min(ratios['cpu']):.1f}× ({_title(worst)}) to {more}{max(ratios['cpu']):.0f}× ({_title(best)})."
    )


def _title(case: Record) -> str:
    return f"{case['layers']} layers, {EXPORTERS[case['exporter']]}"


def _of(case: Record, name: str) -> Record:
    return next(tool for tool in case["tools"] if tool["tool"] == name)


def _ratio(case: Record, tool: Record, key: str) -> float:
    return tool[key] / _of(case, OURS)[key]


def _speed(case: Record) -> str:
    head = ("tool", "wall s", "CPU s", "× wall", "× CPU", "peak MB", *_OUTCOME)
    rows = ((*_timing(case, tool), f"{tool['rss']:.0f}", *_outcome(case, tool)) for tool in case["tools"])
    return f"### {_title(case)}\n\n{_table(head, rows)}"


def _timing(case: Record, tool: Record) -> tuple[str, ...]:
    more = "> " if tool["status"] == "capped" else ""
    times = (f"{more}{tool['wall']:.2f}", f"{more}{tool['cpu']:.2f}")
    if tool["tool"] == OURS or tool["status"] == "failed":
        return (tool["tool"], *times, "", "")
    wall, cpu = (_ratio(case, tool, key) for key in ("wall", "cpu"))
    mark = "**" if min(wall, cpu) >= FASTER else ""
    return (f"{mark}{tool['tool']}{mark}", *times, f"{mark}{more}{wall:.1f}{mark}", f"{mark}{more}{cpu:.1f}{mark}")


def _outcome(case: Record, tool: Record) -> tuple[str, str, str]:
    if "fused" not in tool:
        why = {"capped": "stopped", "failed": tool.get("note", ""), "ok": tool.get("error", "wrote nothing")}[tool["status"]]
        return ("–", why.replace("|", "¦"), "")
    fused = ", ".join(f"{count} {name}" for name, count in tool["fused"].items())
    text = f"{sum(tool['fused'].values())} of {case['layers']}" + (f" ({fused})" if fused else "")
    difference = tool.get("difference")
    loads = "yes" if tool["loads"] else f"no: {tool.get('error', '')[:120]}".replace("|", "¦")
    return (text, loads, "" if difference is None else f"{difference:.1e}")


def _memory(case: Record) -> str:
    size = f"{case['bytes'] / 1e9:.2f} GB in files, {_title(case)}."
    return f"{size}\n\n{_speed(case).partition(chr(10) * 2)[2]}"


def _growth(small: Sequence[Record]) -> str:
    rows: list[tuple[str, ...]] = []
    depths = sorted({case["layers"] for case in small})
    steps = list(itertools.pairwise(depths))
    for exporter, title in EXPORTERS.items():
        cases = {case["layers"]: case for case in small if case["exporter"] == exporter}
        names = dict.fromkeys(tool["tool"] for case in cases.values() for tool in case["tools"])
        rows += [(title, name, *(_further(cases, name, *step) for step in steps)) for name in names]
    return _table(("export", "tool", *(f"{low} → {high}" for low, high in steps)), rows)


def _further(cases: dict[int, Record], name: str, low: int, high: int) -> str:
    if low not in cases or high not in cases:
        return ""
    before, after = _of(cases[low], name), _of(cases[high], name)
    if before["status"] != "ok" or after["status"] == "failed":
        return "–"
    each = (after["cpu"] - before["cpu"]) / (high - low) * 1000
    return f"{'> ' if after['status'] == 'capped' else ''}{each:.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
