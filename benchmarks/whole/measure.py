"""Times a run, looks at the memory of the device, and holds results against others."""

from __future__ import annotations

import dataclasses
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.whole.spec import Case, lengths

FEWEST, MOST = 5, 400
"""Runs that are timed."""
_COMPARED = 1 << 23
"""Elements of a result that are compared; of more, rows at regular distances."""


def nothing() -> None:
    """Does nothing."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Something that is timed.

    Attributes:
        run: Does it once, to its end.
        before: What has to be done before each run and is not timed.
        result: The first result of the last run; None where there is nothing to compare.
        parts: Runs of the model in one run.
        kept: What has to live as long as this does.
    """

    run: Callable[[], object]
    before: Callable[[], object] = nothing
    result: Callable[[], Any] = nothing
    parts: int = 1
    kept: object = None


class Memory:
    """Memory that this process has taken from the GPU since it began; on a CPU the peak of the process."""

    def __init__(self, provider: str) -> None:
        self._free: Callable[[], int] | None = None
        if provider == "cuda":
            import torch

            if torch.cuda.is_available():
                torch.cuda.init()
                self._free = lambda: int(torch.cuda.mem_get_info()[0])
        self._begin = self._least = self._free() if self._free else 0

    def look(self) -> None:
        """Looks: after the runs is early enough, as allocators give nothing back, and disturbs no capturing of a graph."""
        if self._free:
            self._least = min(self._least, self._free())

    @property
    def megabytes(self) -> float:
        """The most that was seen, in MB of 10^6 bytes."""
        if self._free:
            return round((self._begin - self._least) / 1e6, 1)
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1)


def timed(job: Job, memory: Memory, seconds: float) -> dict[str, Any]:
    """Milliseconds of one run of the model: the median, the fastest and the slowest of so many."""
    begin = time.perf_counter()
    warm = 0
    while warm < 3 or (time.perf_counter() - begin < seconds / 4 and warm < MOST):
        job.before()
        job.run()
        warm += 1
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < FEWEST or (time.perf_counter() - begin < seconds and len(times) < MOST):
        job.before()
        start = time.perf_counter()
        job.run()
        times.append(1e3 * (time.perf_counter() - start) / job.parts)
        if len(times) >= 2 and time.perf_counter() - begin > 8 * seconds:
            break
    memory.look()
    return {
        "ms": round(float(np.median(times)), 4),
        "fastest": round(min(times), 4),
        "slowest": round(max(times), 4),
        "runs": len(times),
        "megabytes": memory.megabytes,
    }


def sample(result: np.ndarray[Any, Any], case: Case) -> np.ndarray[Any, Any]:
    """What is compared of a result: rows that count, at most some millions of elements."""
    rows = result.reshape(-1, result.shape[-1])
    if case.padded:
        counted = np.arange(result.shape[1])[None] < np.asarray(lengths(case))[:, None]
        rows = rows[counted.reshape(-1)]
    return rows[:: max(1, rows.size // _COMPARED)]


def difference(found: np.ndarray[Any, Any], kept: pathlib.Path, *, is_reference: bool) -> dict[str, Any]:
    """How far a result is from the plain export's, which is stored if it is this one."""
    if is_reference:
        np.save(kept, found)
    if not kept.exists():
        return {}
    wanted = np.load(kept).astype(np.float32)
    given = found.astype(np.float32)
    if wanted.shape != given.shape:
        return {"difference": None, "mean": None, "largest": None, "not finite": -1}
    fine = np.isfinite(wanted) & np.isfinite(given)
    gap = np.abs(wanted - given)[fine]
    return {
        "difference": float(gap.max(initial=0.0)),
        "mean": float(gap.mean()) if gap.size else 0.0,
        "largest": float(np.abs(wanted[fine]).max(initial=0.0)),
        "not finite": int(fine.size - fine.sum()),
    }
