"""The OpenVINO provider: it fuses decomposed attention itself, at the speed of MultiHeadAttention."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport, UnfusedForm
from onnx_attnfuse.reasons import Reason

_FLOAT = frozenset([ir.DataType.FLOAT])
_RUN = "tested with onnxruntime-ep-openvino 1.8.1 and ONNX Runtime 1.31 on a CPU"
_OPTIONS = frozenset(
    [
        *("cache_dir", "context", "device_id", "device_luid", "device_type", "disable_dynamic_shapes", "enable_causallm"),
        *("enable_opencl_throttling", "enable_qdq_optimizer", "layout", "load_config", "model_priority", "num_of_threads"),
        *("num_streams", "precision", "reshape_input"),
    ]
)
"""Tried with onnxruntime-openvino 1.24.1, which refuses others; ONNX Runtime then goes on with the CPU alone."""
PROVIDER = ExecutionProvider(
    name="openvino",
    ort_name="OpenVINOExecutionProvider",
    distribution="onnxruntime-openvino",
    plugins=("onnxruntime-ep-openvino",),
    known_from=_RUN,
    operators={
        "MultiHeadAttention": OpSupport(
            f"{_RUN}: 11.75 ms, decomposed 11.51; onnxruntime-openvino 1.24 does not claim it; lengths are read in part only",
            _FLOAT,
            _FLOAT,
            masks=frozenset(["none", "bias"]),
            by_default=False,
        ),
        "GroupQueryAttention": Reason("no-kernel-for-device", "GroupQueryAttention is not claimed by openvino (plugin 1.8.1)"),
        "onnx.Attention": Reason(
            "no-kernel-for-device",
            "onnx.Attention ends sessions of openvino 1.24 with an error, and 1.8.1 of the plugin does not claim it",
        ),
        "PackedMultiHeadAttention": None,
    },
    unfused_form=UnfusedForm(f"{_RUN}; a mask by Where stays apart on a GPU (OpenVINO #37675)", _FLOAT),
    skip_norms="without sum",
    decomposed_norms=frozenset(["RMSNormalization"]),
    keeps_nan_rows=True,
    mixes_up_inputs=True,
    session_options=_OPTIONS,
)
"""If onnxruntime-openvino 1.24.1 takes a whole model, it drops unused inputs, and then passes inputs by their original index.
It splits a model with RMSNormalization into parts that read each other, so that none loads."""
