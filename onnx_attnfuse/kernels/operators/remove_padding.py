"""com.microsoft.RemovePadding: the tokens of a batch without its padding."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="RemovePadding",
    inputs={"input": "input", "sequence_token_count": "lengths"},
    kind="padding",
    packed=True,
    on_cpu="no kernel",
    fragile=False,
)
