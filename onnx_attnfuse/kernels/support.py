"""Support for fused operators by execution providers: `support(op, provider)` is the one place to ask."""

from __future__ import annotations

from onnx_attnfuse.kernels.execution_provider import UNFUSED, ExecutionProvider, OpSupport
from onnx_attnfuse.kernels.operators import by_key
from onnx_attnfuse.reasons import Reason, Refused


def support(op: str, provider: ExecutionProvider) -> OpSupport | Reason:
    """The support that an execution provider has for an operator, or why the operator is not used there.

    The provider's record is asked first, then the operator's own: a new provider tells of operators that it finds, a new operator
    of providers.

    Args:
        op: The operator, `onnx.` before it if it is a standard one; or `UNFUSED`.
        provider: The execution provider.
    """
    if op == UNFUSED:
        own = provider.unfused_form
        return (
            Reason("no-kernel-for-device", f"{provider.name} is not known to fuse attention itself")
            if own is None
            else own.support
        )
    info = by_key().get(op)
    of_operator = None if info is None else info.support.get(provider.name)
    if op not in provider.operators:
        unknown = Reason("no-kernel-for-device", f"it is not known whether {op} has a kernel on {provider.name}")
        return unknown if of_operator is None else of_operator()
    found = provider.operators[op]
    return Reason("no-kernel-for-device", f"{op} has no kernel on {provider.name}") if found is None else found


def supported(op: str, provider: ExecutionProvider) -> OpSupport:
    """The support that an execution provider has for an operator that is planned or built for it.

    Raises:
        Refused: The operator is not used there.
    """
    found = support(op, provider)
    if isinstance(found, Reason):
        raise Refused(found.code, found.message)
    return found
