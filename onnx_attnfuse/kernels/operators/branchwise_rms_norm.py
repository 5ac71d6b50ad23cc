"""com.microsoft.BranchwiseRMSNorm: RMS normalization of branches of the last axis, with factors of a type of their own."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="BranchwiseRMSNorm",
    inputs={"X": "input", "scale": "weights"},
    runtime=(1, 31),
    kind="normalization",
    on_cpu="no kernel",  # of older versions
    fragile=False,
)
