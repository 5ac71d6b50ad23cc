"""com.microsoft.MultiHeadAttention: any attention without soft cap; keys and values may be packed, or lie by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.op_node import OpNode


def _describe(node: OpNode) -> AttentionParams:
    """The attention that a MultiHeadAttention in a model asks for."""
    heads = node.number("num_heads")
    query = node.dims("query")
    batch, rows = query[:2]
    if len(query) == 5:
        columns, head = rows, query[4]
        v_head = head
    else:
        head = node.part(query[2], heads)
        key, value = node.dims("key"), node.dims("value") if node.has("value") else ()
        columns = key[2] if len(key) == 4 else key[1]
        v_head = head if len(value) != 3 else node.part(value[2], heads)
    if node.has("past_key"):
        columns = node.dims("past_key")[2] + columns
    return node.params(
        dtype=node.dtype(),
        batch=batch,
        heads=heads,
        rows=rows,
        columns=columns,
        head_size=head,
        v_head_size=v_head,
        mask=node.mask("key_padding_mask", "attention_bias", batch),
        causal=bool(node.number("unidirectional")),
        cached=node.has("past_key"),
        op=node.op,
    )


INFO = OpInfo(
    name="MultiHeadAttention",
    inputs={
        "query": "query",
        "key": "key",
        "value": "value",
        "bias": "projection bias",
        "key_padding_mask": "mask",
        "attention_bias": "bias",
        "past_key": "past",
        "past_value": "past",
        "past_sequence_length": "other",
        "cache_indirection": "other",
    },
    on_cpu="some forms",
    rank=1,
    target="onnx_attnfuse.targets.multi_head_attention",
    describe=_describe,
)
