"""Worker processes that may die or hang: the graph they were on is known, and the others go on."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import Any

from tests.fuzz.judging import Outcome, Subject
from tests.fuzz.recipe import Recipe

PATIENCE = 60.0
"""Seconds after which a graph hangs."""

_UP, _READY = "up", "ready"
"""What a process says when it has started, and when the original of its job has run."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One graph to be judged."""

    seed: int
    recipe: Recipe
    levels: tuple[str, ...]


def _work(pipe: Any, subject: Callable[[Recipe], Any]) -> None:
    """Judges what comes through the pipe, until nothing does."""
    pipe.send(_UP)
    while (job := pipe.recv()) is not None:
        _judge(pipe, subject, job)


def _judge(pipe: Any, subject: Callable[[Recipe], Any], job: Job) -> None:
    """Sends an outcome for each level; of an exception of the fuzzer itself, the text."""
    try:
        judged = subject(job.recipe)
        judged.prepare()
        pipe.send(_READY)
        for level in job.levels:
            pipe.send(judged.outcome(level))
    except Exception:  # noqa: BLE001 - the parent counts it, and the others go on
        pipe.send(traceback.format_exc())


class _Worker:
    """A process and the job it is on."""

    def __init__(self, context: Any, subject: Callable[[Recipe], Any]) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, subject), daemon=True)
        self.process.start()
        other.close()
        self.job: Job | None = None
        self.found: dict[str, Outcome] = {}
        self.since = 0.0
        self.up = self.ready = False
        """Whether the process has started, and whether the original has run, so that whatever happens now is not its doing."""

    def start(self, job: Job) -> None:
        """Hands out a job."""
        self.job, self.found, self.ready = job, {}, False
        self.since = time.monotonic() if self.up else math.inf
        self.pipe.send(job)

    def listen(self) -> bool:
        """Takes what was found; whether the job is done."""
        assert self.job is not None
        heard = self.pipe.recv()
        if isinstance(heard, str) and heard in {_UP, _READY}:
            self.since, self.up, self.ready = time.monotonic(), True, heard == _READY
            return False
        for level in self.job.levels[len(self.found) :]:
            self.found[level] = heard if isinstance(heard, Outcome) else Outcome("broken", heard)
            if isinstance(heard, Outcome):
                break
        self.since = time.monotonic()
        return len(self.found) == len(self.job.levels)

    def ended(self, kind: str, detail: str) -> None:
        """Notes that the process did not finish its job, and ends it."""
        assert self.job is not None
        self.process.kill()
        self.process.join()
        for level in self.job.levels[len(self.found) :]:
            self.found[level] = Outcome(kind, detail) if self.ready else Outcome("unrunnable", f"the original: {detail}")

    def stop(self) -> None:
        """Ends a process that has no job."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Processes that judge graphs."""

    def __init__(self, size: int, patience: float = PATIENCE, subject: Callable[[Recipe], Any] = Subject) -> None:
        """Starts the processes.

        Args:
            size: How many.
            patience: Seconds after which a graph hangs.
            subject: What judges a recipe, by its `outcome(level)`.
        """
        self._context = multiprocessing.get_context("spawn")
        self._patience = patience
        self._subject = subject
        self._workers = [self._started() for _ in range(size)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.stop()

    def _started(self) -> _Worker:
        return _Worker(self._context, self._subject)

    def judged(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, dict[str, Outcome]]]:
        """Judges all; results come as they are ready."""
        waiting = iter(jobs)
        busy: dict[Any, _Worker] = {}
        for worker in self._workers:
            if (job := next(waiting, None)) is not None:
                worker.start(job)
                busy[worker.pipe] = worker
        while busy:
            for pipe in connection.wait(list(busy), timeout=1.0):
                worker = busy.pop(pipe)
                worker, done = self._heard(worker)
                if done:
                    yield done
                    if (job := next(waiting, None)) is None:
                        continue
                    worker.start(job)
                busy[worker.pipe] = worker
            for pipe, worker in list(busy.items()):
                if time.monotonic() - worker.since > self._patience:
                    del busy[pipe]
                    fresh, done = self._given_up(worker, "hang", f"no answer after {self._patience:g} s")
                    yield done
                    if (job := next(waiting, None)) is not None:
                        fresh.start(job)
                        busy[fresh.pipe] = fresh

    def _heard(self, worker: _Worker) -> tuple[_Worker, tuple[Job, dict[str, Outcome]] | None]:
        try:
            done = worker.listen()
        except (EOFError, ConnectionError):
            worker.process.join()
            return self._given_up(worker, "crash", f"the process ended with {worker.process.exitcode}")
        assert worker.job is not None
        return worker, (worker.job, worker.found) if done else None

    def _given_up(self, worker: _Worker, kind: str, detail: str) -> tuple[_Worker, tuple[Job, dict[str, Outcome]]]:
        worker.ended(kind, detail)
        assert worker.job is not None
        fresh = self._started()
        self._workers[self._workers.index(worker)] = fresh
        worker.pipe.close()
        return fresh, (worker.job, worker.found)
