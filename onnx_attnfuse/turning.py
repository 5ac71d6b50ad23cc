"""Rotary embeddings that no fused operator has in front of it: before a Concat with a cache, or before what stays spelled out.

They become RotaryEmbedding where they stand, judged like everything else.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.axes.arrange import arrange, cost
from onnx_attnfuse.axes.factors import Axes, Axis, refined
from onnx_attnfuse.axes.views import Laid
from onnx_attnfuse.court import Court
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewrite import connect, tidy
from onnx_attnfuse.spec import AttentionSpec, Source
from onnx_attnfuse.targets.layout import arranged, cheapest, price, typed
from onnx_attnfuse.targets.rotary import takes


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """A value that is rotated by operators that spell it out."""

    old: Source
    sources: tuple[Source, ...]
    """What it is a rotation of."""
    rows: Axis


@dataclasses.dataclass(frozen=True)
class Turning:
    """One graph, and what is needed to build in it."""

    scope: Scope
    model: ir.Model
    builder: Builder
    court: Court

    def turn(self, spec: AttentionSpec) -> int:
        """Replaces what is left of the rotations of queries and keys; returns how many there were."""
        return sum(self._replaced(rotation, spec) for rotation in _rotations(spec))

    def _replaced(self, rotation: _Rotation, spec: AttentionSpec) -> bool:
        old = rotation.old.laid.value
        node = old.producer()
        if node is None or node.graph is not self.scope.graph or not (viewers(old) or old.is_graph_output()):
            return False
        self.builder.at(node)
        try:
            new, stop = self._emit(rotation, spec)
            self.court.pairs([(old, new)], [stop], spec.name, self.scope, self.model)
        except Refused:
            tidy(self.builder)
            return False
        connect(old, new, self.builder, [user for user, _ in old.uses()])
        sweep([old])
        return True

    def _emit(self, rotation: _Rotation, spec: AttentionSpec) -> tuple[ir.Value, ir.Value]:
        """Builds it beside its nodes; returns it and what it is computed from.

        Raises:
            Refused: The operator cannot rotate it.
        """
        builder, laid, rotary = self.builder, rotation.old.laid, rotation.sources[0].rotary
        assert rotary is not None
        targets = [target for target in _targets(rotation, spec) if takes(rotary, target)]
        dtype = builder.facts.dtype(laid.value)
        if not targets or dtype is None:
            raise Refused("rotated-by-head", "the rotation differs by head")
        chosen = [(target, cheapest(rotation.sources, target)) for target in targets]
        target, source = min(
            chosen, key=lambda pair: price(rotation.sources, pair[1], pair[0]) + cost(Laid(laid.value, pair[0]), laid.axes)
        )
        value = arrange(builder, Laid(arranged(builder, source, target, dtype), target), laid.axes)
        return typed(builder, value, dtype), source.laid.value


def _rotations(spec: AttentionSpec) -> list[_Rotation]:
    """The rotations of queries, keys and new keys that are spelled out."""
    operands = [(spec.query, spec.axes.i), (spec.key, spec.axes.j)]
    if spec.cache is not None:
        operands.append((spec.cache.new[0], spec.cache.new_axis))
    found: list[_Rotation] = []
    for operand, rows in operands:
        place = next((index for index, source in enumerate(operand) if source.rotary is not None), 0)
        rotary, old = operand[place].rotary, operand[place - 1]
        if rotary is not None and rotary.is_spelled:
            same = tuple(source for source in operand[place:] if source.factor == old.factor)
            found.append(_Rotation(old, same, rows))
    return found


def _targets(rotation: _Rotation, spec: AttentionSpec) -> tuple[Axes, Axes]:
    """The operator's layouts, (b, s, n·h) and (b, n, s, h), of the factors that are there."""
    present = {leaf for axis in refined(rotation.old.laid.axes) for leaf in axis}
    axes = spec.axes
    batch, heads = (tuple(leaf for leaf in axis if leaf in present) for axis in (axes.b, axes.n))
    return (batch, rotation.rows, (*heads, *axes.h)), (batch, heads, rotation.rows, axes.h)
