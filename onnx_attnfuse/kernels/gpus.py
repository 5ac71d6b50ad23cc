"""The GPUs of this machine, from the driver's own tool: nothing is imported, and no context is made on them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Mapping, Sequence

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


GIGA, TERA = 1e9, 1e12


@dataclasses.dataclass(frozen=True)
class DeviceLimits:
    """The data sheet of one device; a product and a sum are two operations."""

    name: str
    bandwidth: float
    """Bytes of its memory that are read or written in a second."""
    peaks: Mapping[str, float]
    """Operations of products in a second, by element type, matrices without zeros that are skipped."""
    source: str


def _gpu(source: str, bandwidth: float, half: float, single: float, *names: str) -> dict[str, DeviceLimits]:
    """One data sheet for all names that the driver has for a GPU.

    Args:
        source: The data sheet.
        bandwidth: GB/s.
        half: TFLOP/s of float16 and bfloat16 in tensor cores.
        single: TFLOP/s of float32: as TensorFloat32 where there are tensor cores for it, as ONNX Runtime multiplies by default.
        names: The GPU's names in nvidia-smi.
    """
    peaks = {"float16": half * TERA, "bfloat16": half * TERA, "float32": single * TERA}
    return {name: DeviceLimits(name, bandwidth * GIGA, peaks, f"NVIDIA {source} data sheet") for name in names}


_KNOWN: Mapping[str, DeviceLimits] = {
    **_gpu("H200", 4800, 989, 494, "NVIDIA H200"),
    **_gpu("H100", 3350, 989, 494, "NVIDIA H100 80GB HBM3"),
    **_gpu("H100", 2000, 756, 378, "NVIDIA H100 PCIe"),
    **_gpu("A100", 2039, 312, 156, "NVIDIA A100-SXM4-80GB"),
    **_gpu("A100", 1935, 312, 156, "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB"),
    **_gpu("A100", 1555, 312, 156, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    **_gpu("L40S", 864, 362, 183, "NVIDIA L40S"),
    **_gpu("L4", 300, 121, 60, "NVIDIA L4"),
    **_gpu("A10", 600, 125, 62.5, "NVIDIA A10"),
    **_gpu("T4", 320, 65, 8.1, "Tesla T4", "NVIDIA T4"),
}


def limits_of(name: str) -> DeviceLimits | None:
    """The limits of the GPU that nvidia-smi calls `name`; None where they are not recorded, as of every CPU."""
    return _KNOWN.get(name.strip())
