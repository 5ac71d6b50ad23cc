"""The MIGraphX provider for GPUs of AMD: it reads contrib operators, which were not measured."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport

_READ = "parsers of AMDMIGraphX (src/onnx); not tested"
_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16])
PROVIDER = ExecutionProvider(
    name="migraphx",
    ort_name="MIGraphXExecutionProvider",
    distribution="onnxruntime-migraphx",
    known_from=_READ,
    operators={
        "MultiHeadAttention": OpSupport(f"{_READ}: the sizes of queries must be numbers", _FLOATS, _FLOATS, by_default=False),
        "PackedMultiHeadAttention": None,
    },
    keeps_fused=True,
)
