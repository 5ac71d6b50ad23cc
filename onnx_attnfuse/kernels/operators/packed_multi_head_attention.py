"""com.microsoft.PackedMultiHeadAttention: attention of every entry with itself, over tokens without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.op_node import OpNode


def _describe(node: OpNode) -> AttentionParams:
    """The attention that a PackedMultiHeadAttention in a model asks for."""
    heads = node.number("num_heads")
    query, offsets = node.dims("query"), node.dims("token_offset")
    head = query[3] if len(query) == 4 else node.part(query[1], heads)
    return node.params(
        dtype=node.dtype(),
        batch=offsets[0],
        heads=heads,
        rows=offsets[1],
        columns=offsets[1],
        head_size=head,
        v_head_size=node.part(node.dims("value")[1], heads) if node.has("value") else head,
        mask="bias" if node.has("attention_bias") else "none",
        op=node.op,
    )


INFO = OpInfo(
    name="PackedMultiHeadAttention",
    inputs={
        "query": "query",
        "key": "key",
        "value": "value",
        "bias": "projection bias",
        "token_offset": "offsets",
        "cumulative_sequence_length": "offsets",
        "attention_bias": "bias",
    },
    packed=True,
    on_cpu="no kernel",
    fragile=False,
    option="packed",
    target="onnx_attnfuse.targets.packed",
    describe=_describe,
)
