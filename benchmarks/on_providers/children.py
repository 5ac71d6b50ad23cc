"""A process that answers lines of JSON, and may die or take too long: `Child`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

LATE = "took more than"
"""How it is told that a task took too long."""


class Died(Exception):
    """The process died of a task, or was ended as it took too long; the message says which."""


class Child:
    """A process, started with its first task and again after each death."""

    def __init__(self, command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> None:
        """A child that is not started yet.

        Args:
            command: The command line.
            seconds: How long a task may take.
            environment: Variables beside those that are set.
        """
        self._command, self._seconds, self._environment = list(command), seconds, {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task.

        Raises:
            Died: The process ended, by itself or by the limit.
        """
        process = self._process = self._process or subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(self._seconds, lambda: (late.set(), process.kill()))
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{json.dumps(dict(task))}\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        code = process.wait()
        self.end()
        raise Died(f"{LATE} {self._seconds:g} s" if late.is_set() else f"ended the process with {_how(code)}")

    def end(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"status {code}"
