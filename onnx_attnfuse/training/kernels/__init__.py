"""The kernels that an attention may run on in training: one file each, with what it cannot do and how it is called."""

from __future__ import annotations

from onnx_attnfuse.training.kernels import cpu_flash, cudnn, efficient, flash, triton_flash
from onnx_attnfuse.training.kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (flash, triton_flash, cudnn, efficient, cpu_flash)
"""In the order in which they are taken where several can."""
