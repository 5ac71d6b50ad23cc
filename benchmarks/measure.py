"""Measures whole commands: wall time, CPU time and peak memory of a child process, with a time cap and a memory cap.

Only the standard library is imported here and in `benchmarks.fusing`: Linux counts what a process was before `exec` in its
peak memory, so a child never reports less than its parent held when it was started.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "capped", "failed"]

MB = 1e6
_TAIL = 2000


@dataclass(frozen=True)
class Usage:
    """What one command took.

    Attributes:
        status: `capped` for one that was stopped at the time cap; its figures are lower bounds.
        wall: Seconds from start to end.
        cpu: Seconds of user and system time.
        rss: Peak resident memory in MB (10^6 bytes).
        note: The last line of what a command that failed printed.
    """

    status: Status
    wall: float
    cpu: float
    rss: float
    note: str = ""


def run(command: Sequence[str], folder: Path, *, cap: float, memory: int) -> Usage:
    """Runs a command to its end or to the cap.

    Args:
        command: The command; what it prints goes to a temporary file.
        folder: Its working directory, and where its temporary files go.
        cap: Seconds after which it and its children are killed.
        memory: Bytes it may allocate; files that it maps do not count.
    """
    stopped = threading.Event()
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        resource.prlimit(child.pid, resource.RLIMIT_DATA, (memory, memory))
        timer = threading.Timer(cap, _stop, (child.pid, stopped))
        timer.start()
        _, code, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        timer.cancel()
        timer.join()
        child.returncode = os.waitstatus_to_exitcode(code)
        note = _last_line(printed.fileno()) if child.returncode and not stopped.is_set() else ""
    status: Status = "capped" if stopped.is_set() else "failed" if child.returncode else "ok"
    return Usage(status, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MB, note)


def _stop(group: int, stopped: threading.Event) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended at the last moment
        os.killpg(group, signal.SIGKILL)
        stopped.set()


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, _TAIL, max(0, size - _TAIL)).decode(errors="replace")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
