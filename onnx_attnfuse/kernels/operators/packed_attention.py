"""com.microsoft.PackedAttention: Attention of com.microsoft over tokens without padding."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="PackedAttention",
    inputs={
        "input": "input",
        "weights": "weights",
        "bias": "projection bias",
        "token_offset": "offsets",
        "cumulative_sequence_length": "offsets",
        "attention_bias": "bias",
    },
    packed=True,
    on_cpu="no kernel",
    fragile=False,
)
