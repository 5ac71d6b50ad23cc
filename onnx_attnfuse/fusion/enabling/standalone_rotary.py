"""Standalone rotary embeddings, fused to RotaryEmbedding in place.

They come before a cache that the fused attention does not append to, before a normalization, for some rows or channels of an
operand only, or before an attention that stays decomposed. Each change is verified like a site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, length, new_axes, refined
from onnx_attnfuse.attention.axes.rearrange import arrange, cost
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.operands import sources
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import is_constant, is_standard, needed
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import least
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.layout import arranged, cheapest, price, typed
from onnx_attnfuse.targets.rotary import takes
from onnx_attnfuse.transforms.rewriting import GraphContext

_THROUGH = frozenset(
    """
    Cast Concat Div Expand Identity LayerNormalization Mul RMSNormalization Reshape ScatterND SimplifiedLayerNormalization Slice
    Split Squeeze Transpose Unsqueeze
    """.split()
)
"""Operators allowed between a rotation and the attention."""
_MAX_VALUES_ABOVE = 24
_TURNING = Subject("replacing a rotary embedding")


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """A value that is rotated by decomposed operators."""

    old: IndexedValue
    sources: tuple[Source, ...]
    """The values that `old` is a rotation of, nearest first."""


def fuse_rotary(spec: AttentionSpec, graph: GraphContext) -> int:
    """Fuses the remaining rotations of an attention's queries and keys in place; returns their number."""
    operands = (spec.query, spec.key) if spec.cache is None else (spec.query, spec.key, spec.cache.new[0])
    found: list[_Rotation | None] = []
    with contained(_TURNING, spec.name):
        found = [_rotation(operand) or _rotation_above(operand[-1].indexed.value, graph.scope.facts) for operand in operands]
    return sum(_is_replaced(rotation, spec.name, graph) for rotation in found if rotation is not None)


def _is_replaced(rotation: _Rotation, name: str, graph: GraphContext) -> bool:
    """Whether a rotation was replaced by RotaryEmbedding."""
    old = rotation.old.value
    node = old.producer()
    if node is None or node.graph is not graph.scope.graph or not (viewers(old) or old.is_graph_output()):
        return False
    with graph.rewrite(node, _TURNING, name) as edit:
        new, stop = _emit(rotation, graph.builder)
        edit.replace([(old, new)], [stop])
    return edit.reason is None


def _emit(rotation: _Rotation, builder: Builder) -> tuple[ir.Value, ir.Value]:
    """Builds RotaryEmbedding beside the nodes of a rotation; returns its result and its operand.

    Raises:
        Refused: The operator cannot rotate it.
    """
    indexed, rotary = rotation.old, rotation.sources[0].rotary
    assert rotary is not None
    targets = [target for target in _targets(indexed) if takes(rotary, target)]
    dims, dtype = builder.facts.dims(indexed.value), builder.facts.dtype(indexed.value)
    if not targets or dims is None or dtype is None:
        raise Refused(
            "rotated-otherwise", "the rotation differs by head, the number of heads is unknown, or the operator lacks the layout"
        )
    if any(least(dim) < 1 for dim in dims):
        raise Refused("maybe-empty", "the rotated value may be empty, which Reshape cannot express")
    chosen = [(target, cheapest(rotation.sources, target)) for target in targets]
    target, source = min(
        chosen,
        key=lambda pair: price(rotation.sources, pair[1], pair[0]) + cost(IndexedValue(indexed.value, pair[0]), indexed.axes),
    )
    value = arrange(builder, IndexedValue(arranged(builder, source, target, dtype), target), indexed.axes)
    return typed(builder, value, dtype), source.indexed.value


def _rotation(chain: tuple[Source, ...]) -> _Rotation | None:
    """The rotation in a chain of views, if it is decomposed."""
    place = next((index for index, source in enumerate(chain) if source.rotary is not None), 0)
    rotary, old = chain[place].rotary, chain[place - 1]
    if rotary is None or not rotary.is_decomposed:
        return None
    return _Rotation(old.indexed, tuple(source for source in chain[place:] if source.factor == old.factor))


def _rotation_above(value: ir.Value, facts: Facts) -> _Rotation | None:
    """The nearest rotation further up."""
    for indexed, channels in _values_above(value, facts):
        found = _rotation(sources(indexed, facts, channels))
        if found is not None:
            return found
    return None


def _values_above(start: ir.Value, facts: Facts) -> Iterator[tuple[IndexedValue, Axis]]:
    """Values that may be rotated, nearest first, each with its channels."""
    pending = [start]
    for value in pending:
        dims, node = facts.dims(value), value.producer()
        if node is None or dims is None or len(pending) > _MAX_VALUES_ABOVE:
            continue
        if len(dims) in {3, 4} and isinstance(dims[-1], int):
            axes = new_axes(dims)
            yield IndexedValue(value, axes), axes[-1]
        if node.op_type in _THROUGH:
            pending += [item for item in node.inputs if item is not None and not is_constant(item) and item not in pending]


def _targets(indexed: IndexedValue) -> list[Axes]:
    """The operator's layouts, (b, n, s, h) and (b, s, n·h), that a value lies in or comes to without being rearranged."""
    axes = refined(indexed.axes)
    if any(leaf.position is not None for axis in axes for leaf in axis):
        return []
    if len(axes) == 4 and isinstance(length(axes[2]), int):
        return [axes, (axes[0], axes[1], (*axes[2], *axes[3]))]
    return [axes] if len(axes) in {3, 4} else []


_CACHES = (1, 2)


def widen_caches(graph: GraphContext) -> list[ir.Node]:
    """Repeats the caches of RotaryEmbedding for every entry of the batch; returns the nodes.

    Exporters leave the batch of the caches at 1, as in torch; the kernels want a cache for every entry.
    """
    facts = graph.scope.facts
    found = [node for node in graph.scope.graph if _has_narrow_caches(node, facts)]
    for node in found:
        operand = dims_of(graph.builder, needed(node, 0))
        graph.builder.at(node)
        for place in _CACHES:
            cache = needed(node, place)
            wide = graph.builder.expand(cache, [operand[0], *dims_of(graph.builder, cache)[1:]])
            node.replace_input_with(place, wide)
    return found


def _has_narrow_caches(node: ir.Node, facts: Facts) -> bool:
    """Whether the node reads caches of batch 1 in place, for operands of another batch."""
    if not is_standard(node, "RotaryEmbedding") or len(node.inputs) > len(_CACHES) + 1:
        return False
    operand, *caches = (facts.dims(needed(node, place)) for place in range(3))
    if not operand or operand[0] == 1:
        return False
    return all(cache is not None and len(cache) == 3 and cache[0] == 1 for cache in caches)
