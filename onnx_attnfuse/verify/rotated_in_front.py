"""Rotations of GroupQueryAttention by RotaryEmbedding in front of it, so that each token is rotated by its own position.

The operator's input `position_ids` has one for each token. The CPU's kernel reads the first alone where nothing is cached yet.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.operators import group_query_attention, rotary_embedding

_ROTARY = ("cos_cache", "sin_cache", "position_ids")


def rotated_in_front(model: ir.Model) -> ir.Model:
    """A copy of the model whose GroupQueryAttention nodes do not rotate themselves."""
    copy = model.clone()
    for node in list(copy.graph.all_nodes()):
        if node.domain == CONTRIB and node.op_type == group_query_attention.INFO.name and attribute(node, "do_rotary", 0):
            _respell(node)
    return copy


def _respell(node: ir.Node) -> None:
    info = group_query_attention.INFO
    cos, sin, positions = (info.input(node, name) for name in _ROTARY)
    if positions is None or cos is None or node.graph is None:
        return
    unpack(node)
    for place, name in ((0, "num_heads"), (1, "kv_num_heads")):
        heads: int = attribute(node, name, 0)
        attributes: dict[str, int] = {"num_heads": heads, "interleaved": attribute(node, "rotary_interleaved", 0)}
        value = node.inputs[place]
        width, channels = _last(cos), None if value is None else _last(value)
        if width is not None and channels is not None and 2 * width * heads != channels:
            attributes["rotary_embedding_dim"] = 2 * width
        new = ir.node(rotary_embedding.INFO.name, [value, positions, cos, sin], attributes, domain=CONTRIB)
        new.outputs[0].name = f"{node.name}/rotated/{place}"
        node.graph.insert_before(node, new)
        node.replace_input_with(place, new.outputs[0])
    for name in _ROTARY:
        node.replace_input_with(info.place(name), None)
    del node.attributes["do_rotary"]


def unpack(node: ir.Node) -> None:
    """Slices queries, keys and values from the one tensor that they are handed over as, if they are."""
    packed, graph = node.inputs[0], node.graph
    total = None if packed is None else _last(packed)
    if node.inputs[1] is not None or packed is None or total is None or graph is None:
        return
    counts: list[int] = [attribute(node, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    start, size = 0, total // sum(counts)
    for place, count in enumerate(counts):
        ends = [start, start + count * size, 2]
        bounds = [
            _number(end, f"{node.name}/unpacked/{place}/{name}") for end, name in zip(ends, ("from", "to", "axis"), strict=True)
        ]
        part = ir.node("Slice", [packed, *(constant.outputs[0] for constant in bounds)])
        part.outputs[0].name = f"{node.name}/unpacked/{place}"
        part.outputs[0].type = packed.type
        part.outputs[0].shape = ir.Shape([None, None, count * size])
        graph.insert_before(node, (*bounds, part))
        node.replace_input_with(place, part.outputs[0])
        start += count * size


def _number(number: int, name: str) -> ir.Node:
    """A constant vector of one number."""
    node = ir.node("Constant", [], {"value": ir.tensor([number], ir.DataType.INT64)})
    node.outputs[0].name = name
    return node


def _last(value: ir.Value) -> int | None:
    size = None if value.shape is None or not value.shape else value.shape[-1]
    return size if isinstance(size, int) else None
