"""com.microsoft.GroupQueryAttention: causal attention with a cache, also within a window, capped, of grouped heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.op_node import OpNode


def _describe(node: OpNode) -> AttentionParams:
    """The attention that a GroupQueryAttention in a model asks for."""
    heads, kv_heads = node.number("num_heads"), node.number("kv_num_heads")
    batch, rows, width = node.dims("query")[:3]
    head = node.part(width, heads if node.has("key") else heads + 2 * kv_heads)
    past = node.dims("past_key")[2] if node.has("past_key") else 0
    return node.params(
        dtype=node.dtype(),
        batch=batch,
        heads=heads,
        rows=rows,
        columns=past + rows,
        head_size=head,
        v_head_size=head,
        mask="bias" if node.has("attention_bias") else "none",
        causal=True,
        windowed=node.number("local_window_size", -1) > 0,
        capped=node.is_capped or node.number("smooth_softmax", -1) > 0 or node.has("head_sink"),
        has_sink=node.number("smooth_softmax", -1) > 0 or node.has("head_sink"),
        cached=node.has("past_key"),
        grouped=heads != kv_heads,
        op=node.op,
    )


INFO = OpInfo(
    name="GroupQueryAttention",
    inputs={
        "query": "query",
        "key": "key",
        "value": "value",
        "past_key": "past",
        "past_value": "past",
        "seqlens_k": "last",
        "total_sequence_length": "total",
        "cos_cache": "cos",
        "sin_cache": "sin",
        "position_ids": "positions",
        "attention_bias": "bias",
        "head_sink": "sink",
        "k_scale": "other",
        "v_scale": "other",
        "q_norm_weight": "other",
        "k_norm_weight": "other",
        "query_seqlens": "rows",
    },
    not_on_cpu=frozenset(["q_norm_weight", "k_norm_weight"]),
    rank=2,
    target="onnx_attnfuse.targets.group_query_attention",
    describe=_describe,
)
