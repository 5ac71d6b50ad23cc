"""com.microsoft.BiasSplitGelu: a bias, a cut in two along the last axis, and the left half times the Gelu of the right."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

WIDTHS = (2560, 5120, 10240)
"""Lengths of the last axis that there is a kernel for, both halves together."""
INFO = OpInfo(
    name="BiasSplitGelu",
    inputs={"X": "input", "bias": "projection bias"},
    kind="activation",
    on_cpu="no kernel",
    fragile=False,
)
