"""com.microsoft.RotaryEmbedding: queries or keys, rotated by their positions."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="RotaryEmbedding",
    inputs={"input": "input", "position_ids": "positions", "cos_cache": "cos", "sin_cache": "sin"},
    kind="rotation",
    fragile=False,
)
