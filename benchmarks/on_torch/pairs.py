"""Ours and the same model written by hand, in turn: their ratio without the machine's drift."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.on_torch import steps

PAIRS = {"eager": ("by hand", "ours"), "compiled": ("by hand + compile", "ours + inductor")}


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model, type and backend for what is no attention."""
    for race in steps.races(setting):
        for rest, names in PAIRS.items():
            variants = {name.partition(" +")[0]: race.variants[name] for name in names}
            yield dataclasses.replace(race, label=f"{race.label}, {rest}", variants=variants)


BENCHMARK = Benchmark(
    "Training on PyTorch: ours and by hand in turn", races, "Milliseconds (times as fast as by hand in the same round)."
)
