"""com.microsoft.LinearAttention: a matrix as a state, which fades, takes up each token, and is read by its query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.execution_provider import OpSupport


def _on_cpu() -> OpSupport:
    import onnx_ir as ir

    from onnx_attnfuse.kernels.execution_provider import OpSupport

    float32 = frozenset([ir.DataType.FLOAT])
    return OpSupport("measured with ONNX Runtime 1.31 and 1.32 (docs/targets.md)", float32, float32)


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
    support={"cpu": _on_cpu},
)
"""Linear attention, retention, delta rules with and without decays, and state spaces with a number for each head."""
