"""GroupQueryAttention's preparation of queries and keys, done before it, for a CPU whose kernel does not.

- Rotations by RotaryEmbedding, so that each token is rotated by its own position. The operator's input `position_ids` has one for
  each token, and the CPU's kernel reads the first alone where nothing is cached yet.
- RMS normalizations of heads, which the CPU's kernel refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, builder_for
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB, is_contrib
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.kernels.operators import group_query_attention, rotary_embedding

_INFO, _ROTATION = group_query_attention.INFO, rotary_embedding.INFO.name
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
    for build, node in grouped(copy):
        if _normalizes(node):
            _normalize(build, node)
        if rotations and attribute(node, "do_rotary", 0):
            _rotate(build, node)
    return copy


def grouped(model: ir.Model) -> Iterator[tuple[Builder, ir.Node]]:
    """Every GroupQueryAttention, with a builder of nodes before it."""
    names = all_names(model)
    for scope in scopes(model):
        build = builder_for(scope, names)
        for node in [item for item in scope.graph if is_contrib(item, _INFO.name)]:
            build.at(node)
            yield build, node


def _normalize(build: Builder, node: ir.Node) -> None:
    unpack(build, node)
    attributes = {"axis": -1, "epsilon": attribute(node, "qk_norm_epsilon", 1e-6), "stash_type": 1}
    for place, name in enumerate(_NORMS):
        whole, heads = node.inputs[place], attribute(node, _HEADS[place], 0)
        dims, dtype = (None, None) if whole is None else (build.facts.dims(whole), build.facts.dtype(whole))
        apart = build.node("Reshape", [whole, build.constant([0, 0, heads, -1])], dtype=dtype)
        normal = build.node(_NORM, [apart, _INFO.input(node, name)], attributes, dtype=dtype)
        joined = build.node("Reshape", [normal, build.constant([0, 0, -1])], dims=dims, dtype=dtype)
        node.replace_input_with(place, joined)
        node.replace_input_with(_INFO.place(name), None)
    node.attributes.pop("qk_norm_epsilon", None)


def _rotate(build: Builder, node: ir.Node) -> None:
    cos, sin, positions = (_INFO.input(node, name) for name in _ROTARY)
    if positions is None or cos is None:
        return
    unpack(build, node)
    for place, name in enumerate(_HEADS):
        heads: int = attribute(node, name, 0)
        attributes: dict[str, int] = {"num_heads": heads, "interleaved": attribute(node, "rotary_interleaved", 0)}
        value = node.inputs[place]
        width, channels = _last(build, cos), _last(build, value)
        if width is not None and channels is not None and 2 * width * heads != channels:
            attributes["rotary_embedding_dim"] = 2 * width
        node.replace_input_with(place, build.node(_ROTATION, [value, positions, cos, sin], attributes, domain=CONTRIB))
    for name in _ROTARY:
        node.replace_input_with(_INFO.place(name), None)
    del node.attributes["do_rotary"]


def unpack(build: Builder, node: ir.Node) -> None:
    """Slices queries, keys and values from the one tensor that they are passed as, if they are."""
    packed, total = node.inputs[0], _last(build, node.inputs[0])
    if node.inputs[1] is not None or packed is None or total is None:
        return
    counts: list[int] = [attribute(node, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    ends = list(itertools.accumulate(total // sum(counts) * count for count in counts))
    for place, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        node.replace_input_with(place, build.slice(packed, 2, start, end))


def _last(build: Builder, value: ir.Value | None) -> int | None:
    dims = None if value is None else build.facts.dims(value)
    return dims[-1] if dims and isinstance(dims[-1], int) else None
