"""The device that a model will run on: execution provider, architecture, and the switches of its kernels."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from typing import Literal

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels import gpus

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities, times ten, that kernels are forecast for."""
_DEFAULT_ARCHITECTURE = 80


@dataclasses.dataclass(frozen=True)
class Switches:
    """Settings that take kernels of ONNX Runtime away or allow more; none by default."""

    off: frozenset[str] = frozenset()
    """Kernels that it must not choose."""
    any_length: bool = False
    """Kernels are chosen for short sequences too, where ONNX Runtime by itself takes another one."""


NOTHING_SAID = Switches()


@dataclasses.dataclass(frozen=True)
class Device:
    """An execution provider of ONNX Runtime, and the GPU behind it."""

    ep: Literal["cpu", "cuda"]
    arch: int = 0
    """Compute capability times ten; 0 on a CPU."""
    switches: Switches = NOTHING_SAID

    @property
    def name(self) -> str:
        """`cpu`, or `cuda:sm90`."""
        return self.ep if self.ep == "cpu" else f"cuda:sm{self.arch}"

    @property
    def rounds_float16(self) -> bool:
        """Whether float16 sums are rounded to float16.

        The CPU provider has few float16 kernels; it computes in float32 and drops the conversions between, so that a score plus
        -65504 keeps the score, where a GPU rounds it away.
        """
        return self.ep == "cuda"


def resolve(ep: str, arch: str | None = None) -> Device:
    """The device that the options name.

    Args:
        ep: `cpu`, `cuda`, or `auto`: CUDA where the GPU build of onnxruntime is installed.
        arch: `sm80` and the like; None: the GPU here, or sm80 if there is none.

    Raises:
        OptionError: There is no such execution provider or architecture.
    """
    if ep not in {"auto", "cpu", "cuda"}:
        raise OptionError(f"ep is {ep!r}; choose auto, cpu or cuda")
    number = None if arch is None else _architecture(arch)
    if ep == "cpu" or (ep == "auto" and number is None and not _has_gpu_build()):
        if number is not None:
            raise OptionError(f"arch {arch!r} is a GPU's; choose --ep cuda with it")
        return Device("cpu")
    return Device("cuda", number or _architecture_here() or _DEFAULT_ARCHITECTURE)


def _architecture(name: str) -> int:
    found = re.fullmatch(r"(?:sm_?)?(\d+)", name.lower())
    number = int(found[1]) if found else 0
    if number not in ARCHITECTURES:
        raise OptionError(f"arch is {name!r}; choose one of {', '.join(f'sm{item}' for item in ARCHITECTURES)}")
    return number


def _has_gpu_build() -> bool:
    try:
        importlib.metadata.distribution("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _architecture_here() -> int | None:
    """The compute capability of the first GPU."""
    found = gpus.installed()
    return found[0].arch if found else None
