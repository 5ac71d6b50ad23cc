"""The Vitis AI provider for NPUs of AMD: a compiler takes the whole model, and its fusions are not known, so nothing changes."""

from __future__ import annotations

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider

PROVIDER = ExecutionProvider(
    name="vitisai",
    ort_name="VitisAIExecutionProvider",
    distribution="onnxruntime-vitisai",
    known_from="issues of RyzenAI-SW; not tested",
    operators={},
    takes_if=False,
)
