"""com.microsoft.LinearAttention: a matrix as a state, which fades, takes up each token, and is read by its query."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo, recurrence_on_cpu

INFO = OpInfo(
    name="LinearAttention",
    inputs={
        "query": "query",
        "key": "key",
        "value": "value",
        "past_state": "past",
        "decay": "other",
        "beta": "other",
    },
    runtime=(1, 31),
    kind="recurrence",
    fragile=False,
    support={"cpu": recurrence_on_cpu},
)
"""Linear attention, retention, delta rules with and without decays, and state spaces with a number for each head."""
