"""The DirectML provider: MultiHeadAttention with a bias of full shape; its kernels ignore inputs that others read."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.reasons import Reason

_READ = "kernel sources in ONNX Runtime (DmlExecutionProvider/src/Operators); not tested"
_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])


def _unread(params: AttentionParams) -> Reason | None:
    """The kernel computes something else where it should read a window or a soft cap."""
    if not params.windowed and not params.capped:
        return None
    return Reason("wrong-on-device", "GroupQueryAttention of dml reads neither windows nor soft caps")


PROVIDER = ExecutionProvider(
    name="dml",
    ort_name="DmlExecutionProvider",
    distribution="onnxruntime-directml",
    known_from=_READ,
    operators={
        "MultiHeadAttention": OpSupport(
            f"{_READ}: no causal attribute; keys by head count as a past; a bias is (b, n, s, t)",
            _FLOATS,
            _FLOATS,
            masks=frozenset(["none", "bias"]),
        ),
        "GroupQueryAttention": OpSupport(
            f"{_READ}: rotation, window, soft cap and bias are not read, nothing says so; onnxruntime-genai writes it in float16",
            frozenset([ir.DataType.FLOAT16]),
            frozenset([ir.DataType.FLOAT16]),
            masks=frozenset(["none"]),
            causal=True,
            by_default=False,
            is_wrong=_unread,
        ),
        "PackedMultiHeadAttention": None,
    },
    takes_if=False,
)
