"""The TensorRT provider: it has no importer for contrib operators, and fuses decomposed attention itself."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, UnfusedForm
from onnx_attnfuse.reasons import Reason

_READ = "TensorRT's documentation and issues up to 10.16; not tested"
PROVIDER = ExecutionProvider(
    name="tensorrt",
    ort_name="TensorrtExecutionProvider",
    distribution="onnxruntime-gpu",
    known_from=_READ,
    operators={
        "MultiHeadAttention": None,
        "GroupQueryAttention": None,
        "Attention": None,
        "onnx.Attention": Reason(
            "no-kernel-for-device",
            "onnx.Attention has failed and has been wrong on tensorrt (TensorRT #4705, #4732, #4739, #4757)",
        ),
        "PackedMultiHeadAttention": None,
    },
    unfused_form=UnfusedForm(
        f"{_READ} (Fused Attention); roundings at the products as Model Optimizer's exporter for float8 writes them",
        frozenset([ir.DataType.FLOAT]),
        scale="queries",
        rounds_products=True,
    ),
    skip_norms="none",
    keeps_nan_rows=True,
    takes_if=False,
)
