"""Processes that hold one model each, answer in time, and are ended for good.

with Child(task) as child:
    child.ask(None, seconds)        # it has run once
    child.ask(20, seconds)["ms"]    # the times of twenty runs
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from onnx_attnfuse.bench.worker import MARK
from onnx_attnfuse.kernels.providers import FALLBACK, provider

_MODULE = "onnx_attnfuse.bench.worker"


class ChildError(Exception):
    """The process did not do what it was asked to; the message says why, in a line."""


class Process:
    """A process, of Python by default, that is spoken to by lines."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, program: str = sys.executable
    ) -> None:
        """Starts the process.

        Args:
            arguments: The arguments of the interpreter.
            environment: Variables that it has besides those of this process. It imports from where this process does unless
                PYTHONPATH is among them, and not from the working directory.
            program: The interpreter, or another program.
        """
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": paths, **(environment or {})},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def say(self, line: str) -> None:
        """Sends it a line; one that has ended tells why when it is read."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def line(self, end: float, limit: float) -> str | None:
        """The next line it prints; None where it came to its end.

        Args:
            end: When it has to be there, by `time.monotonic`; otherwise the process is stopped.
            limit: The seconds that it had in all, for the message.

        Raises:
            ChildError: It took too long, or ended with an error.
        """
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            self.stop()
            raise ChildError(f"stopped after {limit:g} s") from None
        if line is None and (code := self._process.wait()) != 0:
            raise ChildError(f"the process ended with {code}: {self._complaint()}")
        return line

    def stop(self) -> None:
        """Ends it and all that it started; its last output is still read."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _complaint(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:400] if lines else "it printed nothing"


class Child(Process):
    """A process with one model, as `onnx_attnfuse.bench.worker` has it."""

    def __init__(self, task: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        """Starts it with a task, its `ep` the name of an execution provider; `environment` as for `Process`."""
        super().__init__(["-m", _MODULE], environment)
        self.printed: list[str] = []
        """ONNX Runtime's output to stdout."""
        self.say(json.dumps({**task, "ep": _described(task["ep"])} if "ep" in task else task))

    def __enter__(self) -> Child:
        return self

    def ask(self, runs: int | None, seconds: float) -> dict[str, Any]:
        """The next answer: to the task if `runs` is None, else to so many runs.

        Raises:
            ChildError: It failed, or took longer than `seconds`.
        """
        if runs is not None:
            self.say(str(runs))
        end = time.monotonic() + seconds
        while True:
            line = self.line(end, seconds)
            if line is None:
                raise ChildError("the process ended before it answered")
            if not line.startswith(MARK):
                self.printed.append(line)
                continue
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            if "error" in answer:
                raise ChildError(answer["error"])
            return answer


def _described(ep: str) -> dict[str, Any]:
    """An execution provider for the worker, which imports no records, as their memory would count as the model's."""
    found = provider(ep)
    names = list(dict.fromkeys([found.ort_name, provider(FALLBACK).ort_name]))
    return {"providers": names, "memory": found.memory, "measured_with": dict(found.measured_with)}
