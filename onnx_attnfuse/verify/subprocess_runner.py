"""Running a model in another process, where running it may end the process: one child for all of them, started when needed."""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from onnx_attnfuse.verify import child
from onnx_attnfuse.verify.inputs import Array

LIMIT = 60.0
"""Seconds that one run may take."""


class ProcessDied(Exception):
    """The process that ran a model died of it, or had to be ended; the message says how."""


class RuntimeRefusal(Exception):
    """A model could not be loaded or run; the message is the runtime's."""


class Worker:
    """A process that answers messages, started when there is a first one, and again where it has died."""

    def __init__(self, arguments: Sequence[str], greeting: object = None, environment: Mapping[str, str] | None = None) -> None:
        """A worker that is not started yet.

        Args:
            arguments: The arguments of the interpreter.
            greeting: The first message to each process, which answers it; None: there is none.
            environment: Variables of the process besides those of this one.
        """
        self.command: tuple[str, ...] = (sys.executable, *arguments)
        self._greeting, self._environment = greeting, dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.printed = ""
        """All that processes have printed, once they are ended."""
        self._lock = threading.Lock()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def ask(self, question: object, seconds: float | None = None) -> Any:
        """The answer to a message.

        Raises:
            ProcessDied: The process died of it, or took longer than `seconds`, by default `LIMIT`.
        """
        limit = LIMIT if seconds is None else seconds
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
                if self._greeting is not None:
                    self._answer(self._process, self._greeting, limit)
            return self._answer(self._process, question, limit)

    def _answer(self, process: subprocess.Popen[bytes], question: object, limit: float) -> Any:
        late = threading.Event()
        timer = threading.Timer(limit, lambda: (late.set(), process.kill()))
        timer.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            self.write(question, process.stdin)
            return self.read(process.stdout)
        except (EOFError, OSError):
            code = process.wait()
            self.end()
            raise ProcessDied(_ending(code, limit, late=late.is_set())) from None
        finally:
            timer.cancel()

    def write(self, message: object, stream: IO[bytes]) -> None:
        """Sends a message."""
        child.write(message, stream)

    def read(self, stream: IO[bytes]) -> Any:
        """The next message.

        Raises:
            EOFError: The process has ended.
        """
        return child.read(stream)

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        return subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": paths, **self._environment},
        )

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
            with self._log as log:
                log.seek(0)
                self.printed += log.read().decode(errors="replace")


_WORKER = Worker([str(pathlib.Path(child.__file__))])
atexit.register(_WORKER.end)


def run(
    model: bytes | str, folder: pathlib.Path | None, outputs: Sequence[str] | None, feeds: Mapping[str, Array]
) -> list[Array]:
    """The outputs of a model, asked for or all, from another process.

    Args:
        model: A serialized model, or the name of a file.
        folder: Where a serialized model's data files lie.
        outputs: The names of the outputs; None: all.
        feeds: The inputs by name.

    Raises:
        RuntimeRefusal: ONNX Runtime ended with an error.
        ProcessDied: It ended the process, or took too long.
    """
    wanted = None if outputs is None else list(outputs)
    results, complaint = _WORKER.ask((model, None if folder is None else str(folder), wanted, dict(feeds)))
    if complaint is not None:
        raise RuntimeRefusal(complaint)
    return results


def _ending(code: int, limit: float, *, late: bool) -> str:
    if late:
        return f"running it in ONNX Runtime did not end within {limit:g} s"
    try:
        how = signal.Signals(-code).name
    except ValueError:
        how = f"status {code}"
    return f"running it in ONNX Runtime ended the process with {how}"
