"""The DirectML provider: MultiHeadAttention with a bias of full shape; much that other kernels read is not read here."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.reasons import Reason

_READ = "kernels read in ONNX Runtime (DmlExecutionProvider/src/Operators); nothing was run"
_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])
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
        "GroupQueryAttention": Reason(
            "no-kernel-for-device", "GroupQueryAttention of dml reads no rotation, window, soft cap or bias, and does not say so"
        ),
        "PackedMultiHeadAttention": None,
    },
    takes_if=False,
)
