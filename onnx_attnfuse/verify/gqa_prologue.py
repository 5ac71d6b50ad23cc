"""GroupQueryAttention's preparation of queries and keys, done before it, for a CPU whose kernel does not.

- Rotations by RotaryEmbedding, so that each token is rotated by its own position. The operator's input `position_ids` has one for
  each token, and the CPU's kernel reads the first alone where nothing is cached yet.
- RMS normalizations of heads, which the CPU's kernel refuses.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB, is_contrib
from onnx_attnfuse.kernels.operators import group_query_attention, rotary_embedding

_INFO = group_query_attention.INFO
_ROTARY = ("cos_cache", "sin_cache", "position_ids")
_NORMS = ("q_norm_weight", "k_norm_weight")
_HEADS = ("num_heads", "kv_num_heads")
"""Attributes with the heads of queries and of keys, the first two inputs."""
_NORM = "SimplifiedLayerNormalization"
"""ONNX Runtime's name for RMS normalization, which it has among the operators of ai.onnx."""


def normalizes_itself(model: ir.Model) -> bool:
    """Whether a GroupQueryAttention of the model normalizes queries and keys."""
    return any(_normalizes(node) for node in model.graph.all_nodes())


def _normalizes(node: ir.Node) -> bool:
    is_grouped = is_contrib(node, _INFO.name)
    return is_grouped and all(_INFO.input(node, name) is not None for name in _NORMS)


def in_front(model: ir.Model, *, rotations: bool = True) -> ir.Model:
    """A copy of the model whose GroupQueryAttention nodes do not normalize themselves, nor rotate where `rotations` are moved."""
    copy = model.clone()
    for node in list(copy.graph.all_nodes()):
        if not is_contrib(node, _INFO.name):
            continue
        if _normalizes(node):
            _normalize(node)
        if rotations and attribute(node, "do_rotary", 0):
            _rotate(node)
    return copy


def _normalize(node: ir.Node) -> None:
    unpack(node)
    assert node.graph is not None
    epsilon = attribute(node, "qk_norm_epsilon", 1e-6)
    for place, name in enumerate(_NORMS):
        hint, heads = f"{node.name}/normalized/{place}", attribute(node, _HEADS[place], 0)
        shapes = [_numbers([0, 0, heads, -1], f"{hint}/apart"), _numbers([0, 0, -1], f"{hint}/joined")]
        apart = ir.node("Reshape", [node.inputs[place], shapes[0].outputs[0]])
        normal = ir.node(_NORM, [apart.outputs[0], _INFO.input(node, name)], {"axis": -1, "epsilon": epsilon, "stash_type": 1})
        joined = ir.node("Reshape", [normal.outputs[0], shapes[1].outputs[0]])
        for step, made in enumerate((apart, normal, joined)):
            made.outputs[0].name = f"{hint}/{step}"
        whole = node.inputs[place]
        joined.outputs[0].shape, joined.outputs[0].type = (None, None) if whole is None else (whole.shape, whole.type)
        node.graph.insert_before(node, (*shapes, apart, normal, joined))
        node.replace_input_with(place, joined.outputs[0])
        node.replace_input_with(_INFO.place(name), None)
    node.attributes.pop("qk_norm_epsilon", None)


def _rotate(node: ir.Node) -> None:
    cos, sin, positions = (_INFO.input(node, name) for name in _ROTARY)
    if positions is None or cos is None or node.graph is None:
        return
    unpack(node)
    for place, name in enumerate(_HEADS):
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
        node.replace_input_with(_INFO.place(name), None)
    del node.attributes["do_rotary"]


def unpack(node: ir.Node) -> None:
    """Slices queries, keys and values from the one tensor that they are passed as, if they are."""
    packed, graph = node.inputs[0], node.graph
    total = None if packed is None else _last(packed)
    if node.inputs[1] is not None or packed is None or total is None or graph is None:
        return
    counts: list[int] = [attribute(node, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    start, size = 0, total // sum(counts)
    for place, count in enumerate(counts):
        ends = [start, start + count * size, 2]
        bounds = [
            _numbers([end], f"{node.name}/unpacked/{place}/{name}")
            for end, name in zip(ends, ("from", "to", "axis"), strict=True)
        ]
        part = ir.node("Slice", [packed, *(constant.outputs[0] for constant in bounds)])
        part.outputs[0].name = f"{node.name}/unpacked/{place}"
        part.outputs[0].type = packed.type
        part.outputs[0].shape = ir.Shape([None, None, count * size])
        graph.insert_before(node, (*bounds, part))
        node.replace_input_with(place, part.outputs[0])
        start += count * size


def _numbers(numbers: list[int], name: str) -> ir.Node:
    """A constant vector."""
    node = ir.node("Constant", [], {"value": ir.tensor(numbers, ir.DataType.INT64)})
    node.outputs[0].name = name
    return node


def _last(value: ir.Value) -> int | None:
    size = None if value.shape is None or not value.shape else value.shape[-1]
    return size if isinstance(size, int) else None
