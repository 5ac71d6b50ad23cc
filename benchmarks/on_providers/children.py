"""A process that answers lines of JSON, and may die or take too long: `Child`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

from onnx_attnfuse.verify.subprocess_runner import ProcessDied, Worker


class Child(Worker):
    """A process of any command, started with its first task and again after each death."""

    def __init__(self, command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> None:
        """A child that is not started yet; a task may take so many seconds."""
        super().__init__([], environment=environment)
        self.command, self._seconds = tuple(command), seconds

    def ask(self, question: object, seconds: float | None = None) -> Any:
        """The answer to a task.

        Raises:
            ProcessDied: The process ended, by itself or by the limit; the message has the last line that it printed.
        """
        before = len(self.printed)
        try:
            return super().ask(question, self._seconds if seconds is None else seconds)
        except ProcessDied as died:
            lines = [line.strip() for line in self.printed[before:].splitlines() if line.strip()]
            raise ProcessDied(f"{died}{f': {lines[-1][:400]}' if lines else ''}") from None

    def write(self, message: object, stream: IO[bytes]) -> None:
        stream.write(f"{json.dumps(message)}\n".encode())
        stream.flush()

    def read(self, stream: IO[bytes]) -> Any:
        line = stream.readline()
        if not line:
            raise EOFError
        return json.loads(line)
