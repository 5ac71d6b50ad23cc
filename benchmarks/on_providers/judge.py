"""What a model's run on an execution provider comes to: `judged`, a `Row` of the table."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.on_providers import tensors
from benchmarks.on_providers.tensors import Array

TOLERANCES = {"float32": 1e-3, "float16": 2e-2}
"""Of the magnitude of an output: providers compute products in their own ways."""
_AS_EXACT = 2
_SLOWER, _SURE = 1.1, 1.03
"""What is slower: by so much in the middle of the pairs, and by so much in three of four."""
EMULATED = frozenset(["qnn", "webgpu"])
"""Providers whose device is emulated on the CPU where these tables are made: their times tell nothing."""
_HUGE = 1e30
"""Numbers from here on stand for a mask, and are no magnitude."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two models on the provider.

    Attributes:
        failed: Why it does not load or run; empty where it does.
        attention: Its attention nodes: Softmax and fused operators.
        claimed: Those of them that the provider runs; None: not known.
        on_cpu: The nodes that the CPU runs by operator; None: there is nothing but the CPU.
        error: The largest difference from the export on the CPU, as a part of the magnitude.
    """

    failed: str = ""
    attention: int = 0
    claimed: int | None = None
    on_cpu: Mapping[str, int] | None = None
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: The export's name.
        lost: Why there is nothing to compare; empty where there is.
        sites: How many attention sites have which status.
        operators: What sites became that were changed.
        left: Why sites stay, by code.
        export: The export on the provider.
        ours: What was written on the provider.
        ratio: The time of ours as a part of the export's, the middle of all pairs.
        low: The quarter of the pairs in which it is least.
        ms: Milliseconds of the export.
        wrong: The cases in which ours is wrong, with how much.
    """

    name: str
    lost: str = ""
    sites: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    operators: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    left: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    export: Side = Side()
    ours: Side = Side()
    ratio: float | None = None
    low: float | None = None
    ms: float | None = None
    wrong: Sequence[str] = ()

    @property
    def changed(self) -> bool:
        """Whether any attention was fused or decomposed."""
        return bool(self.operators)

    def problems(self, *, emulated: bool) -> list[str]:
        """What breaks what is claimed, in words; times count only where the device is none that is emulated."""
        if self.lost:
            return []
        found = [] if self.export.failed else [f"wrong: {case}" for case in self.wrong]
        if self.ours.failed and not self.export.failed:
            found.append(f"does not run, the export does: {self.ours.failed}")
        more = self.more_on_cpu
        if more:
            found.append("more on the CPU: " + ", ".join(f"{count} {op}" for op, count in more.items()))
        if self.slower and not emulated:
            found.append(f"slower: {self.ratio:.2f}")
        return found

    @property
    def more_on_cpu(self) -> dict[str, int]:
        """By how much the CPU has more nodes than with the export, by operator, if it has more in all."""
        before, after = self.export.on_cpu, self.ours.on_cpu
        if (
            before is None
            or after is None
            or self.export.failed
            or self.ours.failed
            or sum(after.values()) <= sum(before.values())
        ):
            return {}
        return {op: count - before.get(op, 0) for op, count in after.items() if count > before.get(op, 0)}

    @property
    def slower(self) -> bool:
        """Whether it takes longer than the export, beyond noise."""
        return self.ratio is not None and self.low is not None and self.ratio > _SLOWER and self.low > _SURE


def judged(name: str, wrote: Mapping[str, Any], answer: Mapping[str, Any], attentions: frozenset[str], *, narrow: bool) -> Row:
    """The line of a model.

    Args:
        name: Its name.
        wrote: What the writer answered.
        answer: What the runner answered.
        attentions: The operators that are attention nodes.
        narrow: The provider computes in float16, whatever the model is.
    """
    expected = [tensors.load(case["expected"]) for case in wrote["cases"]]
    sides = {key: _side(answer[key], wrote["attention"][key], attentions) for key in ("export", "ours")}
    names = [case["name"] for case in wrote["cases"]]
    outputs = {key: _loaded(answer[key], len(expected)) for key in sides}
    errors: dict[str, float] = dict.fromkeys(sides, 0.0)
    wrong: list[str] = []
    for place, wanted in enumerate(expected):
        before, after = outputs["export"][place], outputs["ours"][place]
        export_runs = isinstance(before, dict)
        own = apart(wanted, before) if export_runs else 0.0
        errors["export"] = max(errors["export"], own)
        if isinstance(after, str):
            wrong += [f"{names[place]} fails: {after}"] if export_runs and not sides["ours"].failed else []
            continue
        error = apart(wanted, after, before if export_runs else None)
        errors["ours"] = max(errors["ours"], error)
        if error > max(_tolerance(wanted, narrow=narrow), _AS_EXACT * own if np.isfinite(own) else 0):
            beside = f"the export {own:.1e}" if export_runs else "the export does not run"
            wrong.append(f"{names[place]} by {error:.1e} ({beside})")
    ratios = (
        [new / old for new, old in zip(*(answer["ms"][key] for key in ("ours", "export")), strict=True)] if "ms" in answer else []
    )
    return Row(
        name,
        sites=wrote["sites"],
        operators=wrote["operators"],
        left=wrote["left"],
        export=dataclasses.replace(sides["export"], error=errors["export"]),
        ours=dataclasses.replace(sides["ours"], error=errors["ours"]),
        ratio=round(statistics.median(ratios), 3) if ratios else None,
        low=round(statistics.quantiles(ratios)[0], 3) if ratios else None,
        ms=round(statistics.median(answer["ms"]["export"]), 3) if ratios else None,
        wrong=tuple(wrong),
    )


def apart(expected: Mapping[str, Array], found: Mapping[str, Array], known: Mapping[str, Array] | None = None) -> float:
    """The largest difference of the outputs, as a part of the magnitude of each.

    Args:
        expected: The outputs that are right.
        found: Those that are judged.
        known: Those of another run; where it has NaN, or has not, unlike what is right, nothing is asked.
    """
    return max((_apart(expected[name], found[name], None if known is None else known[name]) for name in expected), default=0.0)


def _apart(expected: Array, found: Array, known: Array | None) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(expected != found)) if expected.size else 0.0
    old, new = expected.astype(np.float64), found.astype(np.float64)
    asked = np.full(old.shape, True) if known is None else np.isnan(known.astype(np.float64)) == np.isnan(old)
    old, new = old[asked], new[asked]
    if np.any(np.isnan(old) != np.isnan(new)):
        return float("inf")
    plain = np.isfinite(old) & (np.abs(old) < _HUGE)
    if np.any((np.abs(new[~plain & ~np.isnan(old)]) < _HUGE) | (np.sign(new) != np.sign(old))[~plain & ~np.isnan(old)]):
        return float("inf")
    difference = np.abs(old - new)[plain]
    return float(difference.max(initial=0) / (np.abs(old[plain]).max(initial=0) or 1))


def _tolerance(outputs: Mapping[str, Array], *, narrow: bool) -> float:
    least = TOLERANCES["float16" if narrow else "float32"]
    return max((TOLERANCES.get(array.dtype.name, least) for array in outputs.values()), default=least) if not narrow else least


def _loaded(answer: Mapping[str, Any], count: int) -> list[dict[str, Array] | str]:
    """The outputs of each case, or why there are none."""
    if "error" in answer:
        return [str(answer["error"])] * count
    return [tensors.load(case["outputs"]) if "outputs" in case else str(case["error"]) for case in answer["cases"]]


def _side(answer: Mapping[str, Any], attention: int, attentions: frozenset[str]) -> Side:
    if "error" in answer:
        return Side(str(answer["error"]), attention)
    failed = str(answer["cases"][0].get("error", ""))
    on_cpu = answer["on cpu"]
    if on_cpu is None:
        return Side(failed, attention)
    there = sum(count for op, count in on_cpu.items() if op in attentions)
    return Side(failed, attention, max(0, attention - there), on_cpu)
