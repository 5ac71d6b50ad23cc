"""A process that answers lines of JSON, and may die or take too long: `Child`."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from onnx_attnfuse.bench.process import ChildError


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
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task.

        Raises:
            ChildError: The process ended, by itself or by the limit.
        """
        process = self._process = self._process or self._started()
        late = threading.Event()
        timer = threading.Timer(self._seconds, lambda: (late.set(), os.killpg(process.pid, signal.SIGKILL)))
        timer.start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{json.dumps(dict(task))}\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        timer.cancel()
        if answer:
            return json.loads(answer)
        self._errors.seek(0)
        said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        code = process.wait()
        self.end()
        if late.is_set():
            raise ChildError(f"stopped after {self._seconds:g} s")
        raise ChildError(f"the process ended with {code}: {said[-1].strip()[:400] if said else 'it printed nothing'}")

    def _started(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": paths, **(self._environment or {})},
        )

    def end(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._errors.close()
