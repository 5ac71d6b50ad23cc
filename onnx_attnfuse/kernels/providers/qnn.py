"""The QNN provider for Qualcomm's NPU: contrib operators go to the CPU, and groups of decomposed nodes become one.

A factor that is one number right before Softmax becomes a part of Softmax.
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
"""With indices of four axes Gather gave wrong elements in the emulator, of truth values and integers of two axes, of floats of
one, and said nothing. Numbers below float16's range are -65536 there, and beside it numbers lie 32 apart, so that scores of
16 and more are left of a row that float32 levels. A ReduceSum of truth values after a Reshape of five axes makes no session.
A Concat of parts that have no elements is not taken at all. RMSNormalization is wrong for some sizes; GroupNormalization makes
no session by itself and was off by 0.3 in models. The result for Sqrt, Reciprocal and two products is also wrong, if it does
not end the session, and LayerNormalization after a sum or product with a table that all entries share, from 16 positions on."""
