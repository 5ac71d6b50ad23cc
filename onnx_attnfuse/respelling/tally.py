"""What each pattern did in a run: how often it was tried, how often it led to something, and how long it took."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar

from onnx_attnfuse.language.readers import Readers

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


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
        self._note(name, tried.hit, started)

    def _note(self, name: str, hit: bool, started: float) -> None:
        count = self.counts.setdefault(name, Count())
        count.tries += 1
        count.hits += hit
        count.seconds += time.perf_counter() - started

    def counting(self, readers: Readers) -> Readers:
        """The same readers, each call counted."""
        scores = {
            key: dataclasses.replace(entry, read=self._counted(entry.name, entry.read)) for key, entry in readers.scores.items()
        }
        weights = {
            key: dataclasses.replace(entry, read=self._counted(entry.name, entry.read)) for key, entry in readers.weights.items()
        }
        return Readers(scores, weights)

    def _counted(self, name: str, read: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
        def counted(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            started = time.perf_counter()
            found = read(*args, **kwargs)
            self._note(name, bool(found), started)
            return found

        return counted
