"""com.microsoft.Attention: self-attention together with the projections of its queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.op_node import OpNode


def _describe(node: OpNode) -> AttentionParams:
    """The attention that an Attention of com.microsoft in a model asks for."""
    heads = node.number("num_heads")
    batch, rows = node.dims("input")[:2]
    widths = node.numbers("qkv_hidden_sizes")
    total = node.dims("weights")[1]
    query, value = (widths[0], widths[2]) if len(widths) == 3 else [node.part(total, 3)] * 2
    past = node.dims("past")[3] if node.has("past") else 0
    return node.params(
        dtype=node.dtype(),
        batch=batch,
        heads=heads,
        rows=rows,
        columns=past + rows,
        head_size=node.part(query, heads),
        v_head_size=node.part(value, heads),
        mask=node.mask("mask_index", "attention_bias", batch),
        causal=bool(node.number("unidirectional")),
        cached=node.has("past"),
        op=node.op,
    )


INFO = OpInfo(
    name="Attention",
    inputs={
        "input": "input",
        "weights": "weights",
        "bias": "projection bias",
        "mask_index": "mask",
        "past": "past",
        "attention_bias": "bias",
        "past_sequence_length": "other",
    },
    rank=4,
    target="onnx_attnfuse.targets.attention",
    describe=_describe,
)
