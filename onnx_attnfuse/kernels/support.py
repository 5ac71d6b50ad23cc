"""What is known of a fused operator on an execution provider: `support(op, provider)`, the one place to ask."""

from __future__ import annotations

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.reasons import Reason


def support(op: str, provider: ExecutionProvider) -> OpSupport | Reason:
    """What the provider's record says of an operator, or why the operator is not used there.

    Args:
        op: The operator, `onnx.` before it if it is a standard one.
        provider: The execution provider.
    """
    if op not in provider.operators:
        return Reason("no-kernel-for-device", f"it is not known whether {op} has a kernel on {provider.name}")
    found = provider.operators[op]
    return Reason("no-kernel-for-device", f"{op} has no kernel on {provider.name}") if found is None else found
