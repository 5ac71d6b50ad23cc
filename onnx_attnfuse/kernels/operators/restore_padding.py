"""com.microsoft.RestorePadding: tokens without padding as a batch again."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="RestorePadding",
    inputs={"input": "input", "token_offset": "offsets"},
    kind="padding",
    packed=True,
    on_cpu="no kernel",
    fragile=False,
)
