"""ai.onnx RotaryEmbedding: queries or keys, rotated by their positions, or by tables that have them looked up already."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="RotaryEmbedding",
    inputs={"X": "input", "cos_cache": "cos", "sin_cache": "sin", "position_ids": "positions"},
    domain="",
    since=23,
    kind="rotation",
    on_cpu="some forms",
    fragile=False,
)
