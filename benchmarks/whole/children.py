"""Processes that measure one variant each, the next one getting ready while one measures."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.whole.cell import MARK, READY

ROOT = pathlib.Path(__file__).parents[2]
_TAIL = 600


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `benchmarks.whole.cell`."""

    name: str
    label: str
    arguments: tuple[str, ...]


class Child:
    """A process; made, it gets ready, and measures when told."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        paths = [str(ROOT), str(ROOT / "patterns"), str(ROOT / "cli"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.whole.cell", *call.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def results(self, cap: float) -> Iterator[dict[str, Any]]:
        """What it prints from now on; ends with what went wrong where it did not come to its end in so many seconds."""
        end = time.monotonic() + cap
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.close()
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                self.stop()
                yield {"error": f"stopped after {cap:.0f} s"}
                return
            if line is None:
                break
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        code = self._process.wait()
        if code:
            yield {"error": f"ended with {code}: {self._complaint()}"}

    def stop(self) -> None:
        """Ends it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() != READY:
                self._lines.put(line)
        self._lines.put(None)

    def _complaint(self) -> str:
        self._errors.seek(0)
        return " ".join(self._errors.read().decode(errors="replace").split())[-_TAIL:]


def one_ahead(calls: list[Call]) -> Iterator[Child]:
    """The processes of the calls in order; each is started while the one before is in use."""
    following = Child(calls[0]) if calls else None
    for at in range(len(calls)):
        current = following
        assert current is not None
        following = Child(calls[at + 1]) if at + 1 < len(calls) else None
        try:
            yield current
        except GeneratorExit:
            if following is not None:
                following.stop()
            raise
        finally:
            current.stop()
