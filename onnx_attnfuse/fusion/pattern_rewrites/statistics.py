"""Statistics of patterns in a run: how often each was tried, how often it led to something, and how long it took."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator
from typing import Concatenate, ParamSpec, TypeVar

import onnx_ir as ir

from onnx_attnfuse.attention.match.steps import Readers
from onnx_attnfuse.containment import Subject, failed
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.reasons import Refused

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


class PatternStatistics:
    """Tries, hits and time of every pattern in one run."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}
        self.matching = 0.0
        """Seconds spent looking for formulas, which all share."""

    @contextlib.contextmanager
    def trying(self, name: str) -> Generator[Tried]:
        """Counts and times one attempt; the caller says whether it was a hit."""
        tried, started = Tried(), time.perf_counter()
        try:
            yield tried
        finally:
            self._note(name, tried.hit, started)

    def _note(self, name: str, hit: bool, started: float) -> None:
        count = self.counts.setdefault(name, Count())
        count.tries += 1
        count.hits += hit
        count.seconds += time.perf_counter() - started

    def counting(self, readers: Readers, subject: Callable[[str], Subject], doubted: set[ir.Node]) -> Readers:
        """Readers whose calls are counted; a failure counts as a refusal and is reported.

        Args:
            readers: The readers.
            subject: The subject of failures of a pattern, by its name.
            doubted: Takes the nodes that readers which are not built in have read.
        """
        scores = {
            key: dataclasses.replace(entry, read=self._counted(entry.name, entry.read, subject(entry.name), doubted))
            for key, entry in readers.scores.items()
        }
        weights = {
            key: dataclasses.replace(entry, read=self._counted(entry.name, entry.read, subject(entry.name), doubted))
            for key, entry in readers.weights.items()
        }
        return Readers(scores, weights)

    def _counted(
        self, name: str, read: Callable[Concatenate[ir.Node, _Arguments], _Answer], subject: Subject, doubted: set[ir.Node]
    ) -> Callable[Concatenate[ir.Node, _Arguments], _Answer]:
        def counted(node: ir.Node, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            started = time.perf_counter()
            try:
                found = read(node, *args, **kwargs)
            except Refused:
                raise
            except Exception as error:
                reason = failed(error, subject, label(node))
                raise Refused(reason.code, reason.message, reason.node) from error
            self._note(name, bool(found), started)
            if found and subject.file is not None:
                doubted.add(node)
            return found

        return counted
