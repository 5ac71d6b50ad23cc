"""com.microsoft.CausalConvWithState: a convolution of each channel by itself, over inputs appended to a state."""

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
    name="CausalConvWithState",
    inputs={"input": "input", "weight": "weights", "bias": "other", "past_state": "past"},
    runtime=(1, 31),
    kind="recurrence",
    fragile=False,
    support={"cpu": _on_cpu},
)
"""For single tokens alone: a Conv of 256 tokens takes a quarter of the time on a CPU."""
