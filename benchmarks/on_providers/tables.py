"""The Markdown of a table of models on an execution provider: `page`."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.harness import table
from benchmarks.on_providers.judge import EMULATED, TOLERANCES, Row, Side
from onnx_attnfuse.kernels import providers

_NONE = "–"
_LENGTH = 110
_EMULATED = "The device is emulated, so nothing was timed."
_TIMED = (
    "Times are medians of at least 7 pairs, in turn. The models are small and the machine was busy, so a tenth is noise. "
    "Models that seemed slower were timed again, alone and for longer, and that time counts."
)


def page(ep: str, versions: Mapping[str, str], rows: Sequence[Row], words: Sequence[str]) -> str:
    """The whole page.

    Args:
        ep: The provider.
        versions: The packages that were run, with their versions.
        rows: A row for each export.
        words: The words of the command that made it.
    """
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = [(row, row.problems(emulated=ep in EMULATED)) for row in rows]
    parts = [
        f"# Many models on {ep}",
        f"{len(rows)} exports on {packages}, before and after `--ep {ep}`. Both were compared with the export on the CPU without "
        f"optimizations, on all its inputs. {_EMULATED if ep in EMULATED else _TIMED}",
        "\n".join(f"- {line}" for line in summary(ep, rows)),
        "## What is not as it should be",
        "\n".join(f"- {row.name}: {'; '.join(map(_short, problems))}" for row, problems in found if problems) or "Nothing.",
        *_not_compared(rows),
        "## Model by model",
        "Attention nodes (Softmax and fused operators) that the provider runs, of all; nodes on the CPU; the largest error "
        "as a part of the magnitude: each before, then after.",
        table(("export", "sites", "attention", "on the CPU", "difference", "time"), [_line(row) for row in rows if not row.lost]),
        f"Made with `python -m benchmarks.providers {' '.join(words)}`.",
    ]
    return "\n\n".join(parts) + "\n"


def summary(ep: str, rows: Sequence[Row]) -> Iterator[str]:
    """What all rows come to on a provider, in a few lines."""
    there = [row for row in rows if not row.lost]
    sites, left = _sum(row.sites for row in there), _sum(row.left for row in there)
    yield "Sites: " + (", ".join(f"{count} `{status}`" for status, count in sites.items()) or "none") + "."
    if left:
        yield "Reasons of those skipped: " + ", ".join(f"`{code}` {count}" for code, count in left.most_common()) + "."
    both = [row for row in there if not row.ours.failed and not row.export.failed]
    only_ours = [row for row in there if row.export.failed and not row.ours.failed]
    only_export = sum(bool(row.ours.failed) and not row.export.failed for row in there)
    neither = len(there) - len(both) - len(only_ours) - only_export
    alone = f"only after: {len(only_ours)}; only before: {only_export}; neither: {neither}"
    yield f"Models that run before and after: {len(both)} of {len(there)}; {alone}."
    yield f"Worse than the export on the provider: {sum(bool(row.wrong) for row in both)}."
    if providers.provider(ep).computes_in_float16:
        limit = TOLERANCES["float16"]
        before, after = (
            sum(side.error > limit for side in sides) for sides in ([row.export for row in both], [row.ours for row in both])
        )
        yield f"Errors above {limit:g} of the magnitude: {before} before, {after} after."
    if only_ours:
        yield f"Wrong among those that run only after: {sum(bool(row.wrong) for row in only_ours)} of {len(only_ours)}."
    counted = [row for row in both if row.export.on_cpu is not None]
    if counted:
        yield from _claims(counted)
    changed = [row for row in both if row.ratio is not None and row.changed]
    if changed:
        yield _times(changed)


def _claims(rows: Sequence[Row]) -> Iterator[str]:
    """What of the models the provider runs, and what the CPU."""
    sides = [row.export for row in rows], [row.ours for row in rows]
    before, after = (sum(sum((side.on_cpu or {}).values()) for side in found) for found in sides)
    more = sum(bool(row.more_on_cpu) for row in rows)
    yield f"Nodes on the CPU: {before} before, {after} after; more in {more} models."
    old, new = (f"{sum(side.claimed or 0 for side in found)} of {sum(side.attention for side in found)}" for found in sides)
    yield f"Attention nodes that the provider runs: {old} before, {new} after."


def _times(rows: Sequence[Row]) -> str:
    """How long ours takes where anything changed."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    low, middle, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
    return (
        f"Time after divided by time before, in {len(ratios)} changed models: median {middle:.2f}, "
        f"quartiles {low:.2f} and {high:.2f}, range {min(ratios):.2f} to {max(ratios):.2f}; "
        f"slower beyond noise in {sum(row.slower for row in rows)}."
    )


def _not_compared(rows: Sequence[Row]) -> Iterator[str]:
    lost = collections.Counter(_short(row.lost) for row in rows if row.lost)
    neither = collections.Counter(_short(row.ours.failed) for row in rows if row.ours.failed and row.export.failed)
    rescued = [row for row in rows if row.export.failed and not row.ours.failed]
    if lost or neither or rescued:
        yield "## What could not be compared"
        yield "\n".join(
            [
                *(f"- {count} not written: {why}" for why, count in lost.items()),
                *(f"- {count} of which neither runs: {why}" for why, count in neither.items()),
                *(
                    f"- {len(group)} of which only ours runs, {_off(group)}; the export: {why}"
                    for why, group in _by_cause(rescued).items()
                ),
            ]
        )


def _by_cause(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by why the export does not run."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_short(row.export.failed), []).append(row)
    return found


def _short(error: str) -> str:
    """The beginning of an error, without the folders and nodes that it names."""
    plain = re.sub(r"(/[\w.+-]+)+/", "", error.replace("|", "¦"))
    plain = re.sub(r"'[^']*'", "…", re.sub(r"\[ONNXRuntimeError\] : \d+ : ", "", plain))
    return re.sub(r"[\w+-]+\.onnx", "it", plain)[:_LENGTH].strip()


def _off(rows: Sequence[Row]) -> str:
    """How far ours is from the export on the CPU, and where that is beyond the tolerance."""
    right = [row.ours.error for row in rows if not row.wrong]
    wrong = [f"{row.name} by {row.ours.error:.0e}" for row in rows if row.wrong]
    return ", ".join([*([f"{max(right):.0e} off at most"] if right else []), *(["off are " + ", ".join(wrong)] if wrong else [])])


def _line(row: Row) -> tuple[str, ...]:
    became = ", ".join(f"{count} {name}" for name, count in row.operators.items())
    kept = sum(row.left.values())
    words = ", ".join(filter(None, [became, f"{kept} left" if kept else ""])) or "none"
    return (
        row.name,
        words,
        *(" → ".join(told(side) for side in (row.export, row.ours)) for told in (_claimed, _on_cpu, _error)),
        _NONE if row.ratio is None else f"{row.ratio:.2f}",
    )


def _claimed(side: Side) -> str:
    return _NONE if side.claimed is None or side.failed else f"{side.claimed}/{side.attention}"


def _on_cpu(side: Side) -> str:
    return _NONE if side.on_cpu is None or side.failed else str(sum(side.on_cpu.values()))


def _error(side: Side) -> str:
    return "fails" if side.failed else f"{side.error:.0e}"


def _sum(counts: Iterable[Mapping[str, int]]) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for item in counts:
        found.update(item)
    return found
