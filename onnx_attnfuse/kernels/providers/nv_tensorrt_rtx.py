"""TensorRT for RTX: it fuses decomposed attention itself; GroupQueryAttention is its only contrib operator."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport, UnfusedForm
from onnx_attnfuse.reasons import Reason

_READ = "TensorRT's documentation, the builder of onnxruntime-genai, and issues; not tested"
PROVIDER = ExecutionProvider(
    name="nv_tensorrt_rtx",
    ort_name="NvTensorRTRTXExecutionProvider",
    distribution="onnxruntime-trt-rtx",
    known_from=_READ,
    operators={
        "MultiHeadAttention": None,
        "GroupQueryAttention": OpSupport(
            f"{_READ}: onnxruntime-genai writes it in half types",
            HALVES,
            HALVES,
            causal=True,
            rotates_inside=True,
            by_default=False,
        ),
        "Attention": None,
        "onnx.Attention": Reason(
            "no-kernel-for-device", "onnx.Attention ends whole models on nv_tensorrt_rtx with an error (TensorRT-RTX #26)"
        ),
        "PackedMultiHeadAttention": None,
    },
    unfused_form=UnfusedForm(f"{_READ} (Fused Attention)", frozenset([ir.DataType.FLOAT]), scale="queries"),
    skip_norms="none",
    keeps_nan_rows=True,
    takes_if=False,
)
