"""Each fused operator in NumPy, as its documentation says and ONNX Runtime computes it; plain rather than fast.

    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS))

They stand in for the kernel where there is none, as for packed attention on the CPU, and say what a kernel should have computed.
Half precision is computed in float32 and rounded once. Where an operator leaves something open its file says what is done here.
"""

from __future__ import annotations

from onnx_attnfuse.verify.references import attention, onnx_attention
from onnx_attnfuse.verify.references.core import Operator
from onnx_attnfuse.verify.references.group_query_attention import GroupQueryAttention
from onnx_attnfuse.verify.references.multi_head_attention import MultiHeadAttention
from onnx_attnfuse.verify.references.packed_attention import PackedAttention
from onnx_attnfuse.verify.references.packed_multi_head_attention import PackedMultiHeadAttention
from onnx_attnfuse.verify.references.remove_padding import RemovePadding
from onnx_attnfuse.verify.references.restore_padding import RestorePadding
from onnx_attnfuse.verify.references.rotary_embedding import RotaryEmbedding

OPERATORS: tuple[type[Operator], ...] = (
    attention.Attention,
    GroupQueryAttention,
    MultiHeadAttention,
    PackedAttention,
    PackedMultiHeadAttention,
    RemovePadding,
    RestorePadding,
    RotaryEmbedding,
    onnx_attention.Attention,
)
