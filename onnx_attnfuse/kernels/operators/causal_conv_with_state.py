"""com.microsoft.CausalConvWithState: a convolution of each channel by itself, over inputs appended to a state."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo, recurrence_on_cpu

INFO = OpInfo(
    name="CausalConvWithState",
    inputs={"input": "input", "weight": "weights", "bias": "other", "past_state": "past"},
    runtime=(1, 31),
    kind="recurrence",
    fragile=False,
    support={"cpu": recurrence_on_cpu},
)
"""For single tokens alone: a Conv of 256 tokens takes a quarter of the time on a CPU."""
