"""Contenders on the same inputs, taking turns: every round each of them runs, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from onnx_attnfuse.bench.contenders import ORIGINAL, Contender
from onnx_attnfuse.bench.inputs import Sample
from onnx_attnfuse.bench.process import Child, ChildError
from onnx_attnfuse.verify.subprocess_runner import Worker

ROUNDS = 5
_WARM = 3


@dataclasses.dataclass(frozen=True)
class Figures:
    """Times and memory of one contender."""

    name: str
    failed: str | None = None
    ms: float | None = None
    """Median of all runs."""
    fastest: float | None = None
    slowest: float | None = None
    quartiles: tuple[float, float] | None = None
    """Half of all runs lie between these."""
    megabytes: float | None = None
    """Peak memory of the process on a CPU; on a GPU the other memory in use, by whomever."""
    ratio: float | None = None
    """How many times as fast as the original, or else as the last that ran: the median of the rounds."""
    ratios: tuple[float, float] | None = None
    """The smallest and the largest ratio of a round."""
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    share: float | None = None
    """How much of the device's limit was reached: the least time that it takes, by the median; None where no limit is known."""


def run(
    contenders: Sequence[Contender],
    sample: Sample,
    folder: pathlib.Path,
    *,
    ep: str,
    runs: int,
    seconds: float,
    how: Mapping[str, Any] | None = None,
) -> list[Figures]:
    """Runs a contest.

    Args:
        contenders: The contenders.
        sample: Their inputs.
        folder: Where the inputs are written.
        ep: Execution provider.
        runs: How often each is run, warm.
        seconds: How long each may take for a round, and to start.
        how: More entries of the workers' task: `threads`, and `clock`, which is `cpu` for the time of the process.
    """
    arrays = sample.save(folder / "inputs.npz")
    own = {item.name: item.inputs.save(folder / f"inputs-{item.name}.npz") for item in contenders if item.inputs}
    failed = {item.name: item.failed for item in contenders if item.failed}
    times: dict[str, list[list[float]]] = {}
    memory: dict[str, float | None] = {}
    with contextlib.ExitStack() as stack:
        alive: dict[str, Worker] = {}
        for item in contenders:
            if item.path is None:
                continue
            task: dict[str, Any] = {
                "model": str(item.path),
                "ep": ep,
                "provider_options": dict(item.provider_options),
                "buffers": dict(item.buffers),
                **own.get(item.name, arrays),
                **(how or {}),
            }
            child = stack.enter_context(Child(task, item.environment))
            try:
                child.ask(None, seconds)
                memory[item.name] = child.ask(_WARM, seconds)["megabytes"]
                alive[item.name] = child
            except ChildError as error:
                failed[item.name] = str(error)
        each = -(-runs // ROUNDS)
        for number in range(ROUNDS):
            names = list(alive)
            turn = number % max(1, len(names))
            for name in (*names[turn:], *names[:turn]):
                block = _timed(alive[name], each, seconds)
                if isinstance(block, str):
                    failed[name] = block
                    del alive[name]
                else:
                    times.setdefault(name, []).append(block)
    return figures([item.name for item in contenders], times, memory, failed, sample)


def _timed(child: Worker, runs: int, seconds: float) -> list[float] | str:
    """The times of some runs, or why there are none."""
    try:
        return child.ask(runs, seconds)["ms"]
    except ChildError as error:
        return str(error)


def figures(
    names: Sequence[str],
    times: Mapping[str, Sequence[Sequence[float]]],
    memory: Mapping[str, float | None],
    failed: Mapping[str, str | None],
    sample: Sample,
) -> list[Figures]:
    """Medians, quartiles and ratios of all contenders; `times` in milliseconds by contender and round."""
    running = [name for name in names if name not in failed and name in times]
    base = ORIGINAL if ORIGINAL in running else running[-1] if running else ""
    found: list[Figures] = []
    for name in names:
        if name not in running:
            found.append(Figures(name, failed.get(name) or "it did not run"))
            continue
        every = sorted(time for block in times[name] for time in block)
        middle = statistics.median(every)
        pairs = zip(times[base], times[name], strict=False)
        ratios = sorted(statistics.median(theirs) / statistics.median(own) for theirs, own in pairs)
        tokens = sample.tokens
        found.append(
            Figures(
                name,
                ms=middle,
                fastest=every[0],
                slowest=every[-1],
                quartiles=_quartiles(every),
                megabytes=memory.get(name),
                ratio=statistics.median(ratios),
                ratios=(ratios[0], ratios[-1]),
                samples_per_second=1e3 * sample.batch / middle,
                tokens_per_second=None if tokens is None else 1e3 * tokens / middle,
            )
        )
    return found


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high
