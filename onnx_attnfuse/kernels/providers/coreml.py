"""The CoreML provider: no operator for attention; a Where or IsNaN between goes to the CPU and cuts the model apart."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, UnfusedForm

_READ = "the operators of ML programs read in ONNX Runtime's sources (coreml_supported_mlprogram_ops.md); nothing was run"
PROVIDER = ExecutionProvider(
    name="coreml",
    ort_name="CoreMLExecutionProvider",
    distribution="onnxruntime",
    known_from=f"{_READ}; the Softmax of decomposed attention is that of the source",
    operators=dict.fromkeys(
        ("MultiHeadAttention", "GroupQueryAttention", "Attention", "onnx.Attention", "PackedMultiHeadAttention")
    ),
    unfused_form=UnfusedForm(
        f"{_READ}: MatMul, Mul, Add and Softmax are among them, Where and IsNaN are not", frozenset([ir.DataType.FLOAT])
    ),
    skip_norms="none",
    keeps_nan_rows=True,
)
