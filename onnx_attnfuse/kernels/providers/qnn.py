"""The QNN provider for Qualcomm's NPU: contrib operators go to the CPU; it fuses groups of decomposed nodes.

It fuses a constant factor right before Softmax into Softmax.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport, UnfusedForm
from onnx_attnfuse.reasons import Reason

_FLOAT = frozenset([ir.DataType.FLOAT])
_RUN = "tested with onnxruntime-qnn 2.7.0 in its emulator of the HTP"
_REFUSED = "was refused by qnn (onnxruntime-qnn 2.7.0), so it would go to the CPU"
PROVIDER = ExecutionProvider(
    name="qnn",
    ort_name="QNNExecutionProvider",
    distribution="onnxruntime-qnn",
    plugins=("onnxruntime-qnn",),
    known_from=_RUN,
    operators={
        "MultiHeadAttention": Reason("no-kernel-for-device", f"MultiHeadAttention {_REFUSED}"),
        "GroupQueryAttention": Reason("no-kernel-for-device", f"GroupQueryAttention {_REFUSED}"),
        "Attention": None,
        "onnx.Attention": OpSupport(
            f"{_RUN}: right to 3e-7, with a soft cap for soc_model=60 only; taken apart again on the HTP",
            _FLOAT,
            _FLOAT,
            masks=frozenset(["none", "bias"]),
            causal=True,
            by_default=False,
            broadcasts_bias=True,
        ),
        "PackedMultiHeadAttention": None,
    },
    unfused_form=UnfusedForm(
        "node groups read in onnxruntime-qnn (builder/qnn_node_group: scale_softmax, masked_softmax)",
        _FLOAT | {ir.DataType.FLOAT16},
    ),
    skip_norms="none",
    keeps_nan_rows=True,
    takes_if=False,
    fixed_sizes=True,
    any_by="ReduceMax",
    computes_in_float16=True,
    rounds_float16=False,
    gathers_flat=True,
    decomposed_norms=frozenset(["GroupNormalization", "RMSNormalization"]),
    merges_into_norms=True,
)
"""Faults of the emulator. Gather with indices of four axes reads wrong elements, of booleans and integers with two axes and of
floats with one. Numbers below float16's range are -65536, where floats are 32 apart, so scores of 16 and more remain in a row
that float32 levels. It makes no session for a ReduceSum of booleans after a Reshape to five axes, or for a Concat with an empty
part. RMSNormalization is wrong for some sizes. GroupNormalization alone makes no session, and was off by 0.3 in models. Sqrt,
Reciprocal and two products are wrong or make no session. LayerNormalization after a sum or product with a table that all
entries share is wrong from 16 positions on."""
