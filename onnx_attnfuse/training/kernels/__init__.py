"""The kernels that an attention may run on in training: a record each, with its refusals and its call."""

from __future__ import annotations

from onnx_attnfuse.training.kernels.kernel import TrainingKernel
from onnx_attnfuse.training.kernels.pytorch import CPU_FLASH, CUDNN, EFFICIENT, FLASH
from onnx_attnfuse.training.kernels.triton import TRITON_FLASH

KERNELS: tuple[TrainingKernel, ...] = (FLASH, TRITON_FLASH, CUDNN, EFFICIENT, CPU_FLASH)
"""All kernels, in the order in which they are taken where several can compute an attention."""
