"""The CoreML provider: it has no operator for attention; a Where or IsNaN goes to the CPU and splits the model."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, UnfusedForm

_READ = "the list of ML program operators in ONNX Runtime's source (coreml_supported_mlprogram_ops.md); not tested"
PROVIDER = ExecutionProvider(
    name="coreml",
    ort_name="CoreMLExecutionProvider",
    distribution="onnxruntime",
    known_from=_READ,
    operators=dict.fromkeys(
        ("MultiHeadAttention", "GroupQueryAttention", "Attention", "onnx.Attention", "PackedMultiHeadAttention")
    ),
    unfused_form=UnfusedForm(
        f"{_READ}: MatMul, Mul, Add and Softmax are among them, Where and IsNaN are not", frozenset([ir.DataType.FLOAT])
    ),
    skip_norms="none",
    keeps_nan_rows=True,
)
