"""What the model will run on, as data."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Literal

from onnx_attnfuse.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Device:
    """An execution provider of ONNX Runtime."""

    ep: Literal["cpu", "cuda"]

    @property
    def rounds_float16(self) -> bool:
        """Whether float16 sums are rounded to float16.

        The CPU provider has few float16 kernels; it computes in float32 and drops the conversions between, so that a score plus
        -65504 keeps the score, where a GPU rounds it away.
        """
        return self.ep == "cuda"


def resolve(ep: str) -> Device:
    """The device that `ep` names; `auto` is CUDA where the GPU build of onnxruntime is installed.

    Raises:
        OptionError: There is no such execution provider.
    """
    if ep == "auto":
        return Device("cuda" if _has_gpu_build() else "cpu")
    if ep == "cpu":
        return Device("cpu")
    if ep == "cuda":
        return Device("cuda")
    raise OptionError(f"ep is {ep!r}; choose auto, cpu or cuda")


def _has_gpu_build() -> bool:
    try:
        importlib.metadata.distribution("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
