"""The calls of PyTorch that training is planned with are run on the CPU, beside attention in float64."""

from __future__ import annotations

import onnx_ir as ir
import pytest

pytest.importorskip("torch")

from benchmarks import training_on_gpu as calls
from benchmarks.harness import WRONG
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.ortmodule.kernels import CPU_FLASH, FLASH


@pytest.mark.parametrize("kind", calls.KINDS, ids=lambda kind: kind.name)
def test_a_call_is_right_or_not_planned(kind: calls.Kind) -> None:
    is_planned = calls.is_planned(CPU_FLASH, kind, ir.DataType.FLOAT, TrainingDevice("cpu"))
    assert is_planned != bool(kind.dropout or kind.trained)
    if is_planned:
        found = calls.outcome(CPU_FLASH, kind, ir.DataType.FLOAT, 77, "cpu")
        assert not found.startswith(WRONG), found


def test_a_kernel_of_another_device_is_not_planned() -> None:
    assert not calls.is_planned(FLASH, calls.KINDS[0], ir.DataType.FLOAT, TrainingDevice("cpu"))
