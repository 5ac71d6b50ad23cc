"""The GPUs of this machine, from the driver's own tool: nothing is imported, and no context is made on them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence

_FIELDS = ("name", "compute_cap", "driver_version", "memory.total")
_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    arch: int
    """Compute capability times ten."""
    driver: str
    memory: str
    """Such as `81559 MiB`."""

    @property
    def capability(self) -> str:
        """Compute capability as it is written: `9.0`."""
        return f"{self.arch // 10}.{self.arch % 10}"


def installed() -> tuple[Gpu, ...]:
    """The GPUs here; none where there is no driver, or one that is too old to tell."""
    return tuple(gpu for line in _asked(_FIELDS) if (gpu := _read(line)) is not None)


def memory_used() -> float | None:
    """MB of 10^6 bytes in use on the first GPU, by every process; None where that is not known."""
    first, *_ = [*_asked(("memory.used",)), ""]
    number = first.removesuffix(" MiB").strip()
    return int(number) * 2**20 / 1e6 if number.isdecimal() else None


def _asked(fields: Sequence[str]) -> list[str]:
    """A line for each GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines()


def _read(line: str) -> Gpu | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_FIELDS):
        return None
    name, capability, driver, memory = parts
    major, _, minor = capability.partition(".")
    return Gpu(name, int(major) * 10 + int(minor), driver, memory) if major.isdecimal() and minor.isdecimal() else None
