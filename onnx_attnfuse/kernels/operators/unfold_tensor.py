"""com.microsoft.UnfoldTensor: pieces of an axis, each a step after the one before, along a new last axis."""

from __future__ import annotations

from onnx_attnfuse.kernels.operators.record import OpInfo

INFO = OpInfo(
    name="UnfoldTensor",
    inputs={"input": "input"},
    kind="view",
    on_cpu="some forms",
    fragile=False,
)
