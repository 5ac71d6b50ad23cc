"""What one command takes: `python -m benchmarks.metered FOLDER SECONDS COMMAND ...` prints it as JSON.

Only the standard library is imported here: Linux counts what a process was before `exec` in its peak memory, so a child never
reports less than its parent held when it was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

MEMORY = 16 * 2**30
"""Bytes that a command may allocate; one that wants more fails."""
_TAIL = 2000


def run(command: Sequence[str], folder: str, cap: float) -> dict[str, Any]:
    """Runs a command in a folder, for its temporary files too, to its end, or kills it and its children after so many seconds.

    Returns:
        `status`: `ok`, `failed`, or `stopped` at the time cap, with figures that are lower bounds; seconds from start to end,
        and of user and system time; peak resident memory in MB (10^6 bytes); the last line that a command that failed printed.
    """
    stopped = threading.Event()

    def stop(group: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended at the last moment
            os.killpg(group, signal.SIGKILL)
            stopped.set()

    environment = os.environ | {"TMPDIR": folder}
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, **options, start_new_session=True, cwd=folder, env=environment)
        resource.prlimit(child.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        timer = threading.Timer(cap, stop, [child.pid])
        timer.start()
        _, code, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        timer.cancel()
        timer.join()
        child.returncode = os.waitstatus_to_exitcode(code)
        size = os.fstat(printed.fileno()).st_size
        lines = os.pread(printed.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").split("\n")
    note = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    status = "stopped" if stopped.is_set() else "failed" if child.returncode else "ok"
    took = {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "mb": usage.ru_maxrss * 1024 / 1e6}
    return {"status": status, **took, "note": note if status == "failed" else status}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[3:], sys.argv[1], float(sys.argv[2]))))
