"""ai.onnx Attention: any attention, capped or not, also of grouped heads and with a cache; masks as a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.operators.record import OpInfo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.conditions import AttentionParams
    from onnx_attnfuse.kernels.op_node import OpNode


def _describe(node: OpNode) -> AttentionParams:
    """The attention that an Attention of ai.onnx in a model asks for."""
    query, key, value = (node.dims(name) for name in "QKV")
    heads, kv_heads = (
        count if isinstance(count := dims[1] if len(dims) == 4 else node.number(name), int) else 0
        for dims, name in ((query, "q_num_heads"), (key, "kv_num_heads"))
    )
    past = node.dims("past_key")[2] if node.has("past_key") else 0
    return node.params(
        dtype=node.dtype(),
        batch=query[0],
        heads=heads,
        rows=query[-2],
        columns=past + key[-2],
        head_size=query[3] if len(query) == 4 else node.part(query[2], heads),
        v_head_size=value[3] if len(value) == 4 else node.part(value[2], kv_heads),
        mask="bias" if node.has("attn_mask") else "none",
        causal=bool(node.number("is_causal")),
        windowed=node.number("left_window_size", -1) >= 0 or node.number("right_window_size", -1) >= 0,
        capped=node.is_capped,
        cached=node.has("past_key"),
        grouped=heads != kv_heads,
        op=node.op,
    )


INFO = OpInfo(
    name="Attention",
    inputs={
        "Q": "query",
        "K": "key",
        "V": "value",
        "attn_mask": "bias",
        "past_key": "past",
        "past_value": "past",
        "nonpad_kv_seqlen": "lengths",
    },
    domain="",
    since=23,
    on_cpu="some forms",
    rank=3,
    target="onnx_attnfuse.targets.onnx_attention",
    describe=_describe,
)
