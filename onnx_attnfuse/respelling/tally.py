"""What each pattern did in a run: how often it was tried, how often it led to something, and how long it took."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator


@dataclasses.dataclass
class Tried:
    """One attempt."""

    hit: bool = False


@dataclasses.dataclass
class Count:
    """All attempts of one pattern."""

    tries: int = 0
    hits: int = 0
    seconds: float = 0.0


class Tally:
    """Counts of one run."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}
        self.matching = 0.0
        """Seconds spent looking for formulas, which all share."""

    @contextlib.contextmanager
    def trying(self, name: str) -> Generator[Tried]:
        """Counts and times one attempt; the caller says whether it was a hit."""
        tried, started = Tried(), time.perf_counter()
        yield tried
        count = self.counts.setdefault(name, Count())
        count.tries += 1
        count.hits += tried.hit
        count.seconds += time.perf_counter() - started
