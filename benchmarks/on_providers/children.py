"""A process that answers lines of JSON, and may die or take too long: `Child`."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from onnx_attnfuse.bench.process import ChildError, Process

LATE = "stopped after"
"""The beginning of the error of a task that took too long."""


class Child:
    """A process, started with its first task and again after each death."""

    def __init__(self, command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> None:
        """A child that is not started yet.

        Args:
            command: The command line.
            seconds: How long a task may take.
            environment: Variables beside those that are set.
        """
        self._command, self._seconds, self._environment = list(command), seconds, environment
        self._process: Process | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task.

        Raises:
            ChildError: The process ended, by itself or by the limit.
        """
        program, *arguments = self._command
        process = self._process = self._process or Process(arguments, self._environment, program=program)
        process.say(json.dumps(dict(task)))
        try:
            answer = process.line(time.monotonic() + self._seconds, self._seconds)
        except ChildError:
            self.end()
            raise
        if answer is None:
            self.end()
            raise ChildError("the process ended before it answered")
        return json.loads(answer)

    def end(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()
