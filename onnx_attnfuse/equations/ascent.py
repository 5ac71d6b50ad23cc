"""What stands before what: steps, factors, views and guards of a graph, followed from a value upwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnx_attnfuse.axes.views import Laid, aligned, upward
from onnx_attnfuse.equations.state import Filled
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language.readers import Readers
from onnx_attnfuse.language.steps import (
    Added,
    Floored,
    NaNZeroed,
    Negated,
    Passed,
    Replaced,
    Scaled,
    ScoreStep,
    Shifted,
    Taken,
    WeightStep,
    Zeroed,
)

_FURTHEST = 24
_OF_KIND: Mapping[str, tuple[type, ...]] = {"scale": (Scaled, Negated), "mask": (Added, Replaced, Floored, Shifted)}
_NOTHING = Filled()


class Ascent:
    """Goes up in one graph."""

    def __init__(self, facts: Facts, readers: Readers) -> None:
        self._facts = facts
        self._readers = readers

    def stripped(self, laid: Laid) -> Laid:
        """A value without views and casts."""
        *_, (laid, _, _) = self.steps(laid, set())
        return laid

    def steps(
        self, laid: Laid, kinds: set[str], steps: tuple[Taken[ScoreStep], ...] = (), nodes: tuple[ir.Node, ...] = ()
    ) -> Iterator[tuple[Laid, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]]:
        """What stands before steps of some kinds: none of them, one, two, ...; the steps first one first."""
        yield laid, steps, nodes
        node = laid.value.producer()
        if node is None or len(nodes) > _FURTHEST:
            return
        view = upward(laid, self._facts, selecting=True)
        if view is not None:
            yield from self.steps(view, kinds, steps, (*nodes, node))
            return
        for step, inner in self._read(node, laid):
            if isinstance(step, Passed):
                yield from self.steps(inner, kinds, steps, (*nodes, node, *step.also))
            elif any(isinstance(step, _OF_KIND[kind]) for kind in kinds):
                taken: Taken[ScoreStep] = Taken(step, node, laid.axes)
                also = step.also if isinstance(step, Shifted) else ()
                yield from self.steps(inner, kinds, (taken, *steps), (*nodes, node, *also))

    def _read(self, node: ir.Node, laid: Laid) -> Iterator[tuple[ScoreStep, Laid]]:
        """What a node does to scores, with the scores before it; those that lack no axis first."""
        reader = self._readers.score(node)
        found: list[tuple[int, ScoreStep, Laid]] = []
        for step in reader(node, self._facts) if reader is not None else ():
            axes = aligned(step.scores, laid.axes, self._facts)
            if axes is not None:
                lost = sum(bool(old) for old in laid.axes) - sum(bool(new) for new in axes)
                found.append((lost, step, Laid(step.scores, axes)))
        yield from ((step, inner) for lost, step, inner in sorted(found, key=lambda item: item[0]) if not lost)

    def factors(
        self, laid: Laid, filled: Filled = _NOTHING, nodes: tuple[ir.Node, ...] = ()
    ) -> Iterator[tuple[Laid, Filled, tuple[ir.Node, ...]]]:
        """What stands before multiplications and divisions, as far as they go and no further, with what they multiply by."""
        node = laid.value.producer()
        ends = True
        view = upward(laid, self._facts, selecting=True) if node is not None and len(nodes) <= _FURTHEST else None
        if view is not None and node is not None:
            yield from self.factors(view, filled, (*nodes, node))
            return
        for step, inner in self._read(node, laid) if node is not None and len(nodes) <= _FURTHEST else ():
            assert node is not None
            if isinstance(step, Passed):
                yield from self.factors(inner, filled, (*nodes, node, *step.also))
                return
            if isinstance(step, Negated):
                after = dataclasses.replace(filled, number=-filled.number)
            elif isinstance(step, Scaled):
                after = self._times(filled, step, laid)
            else:
                continue
            ends = False
            yield from self.factors(inner, after, (*nodes, node))
        if ends:
            yield laid, filled, nodes

    def _times(self, filled: Filled, step: Scaled, laid: Laid) -> Filled:
        number, sign = self._facts.number(step.operand), -1 if step.divide else 1
        if number:
            return dataclasses.replace(filled, number=filled.number * number**sign)
        axes = aligned(step.operand, laid.axes, self._facts) or ()
        return dataclasses.replace(filled, values=(*filled.values, (Laid(step.operand, axes), sign)))

    def opened(self, laid: Laid, *, guarded: bool) -> Iterator[tuple[Laid, tuple[Taken[WeightStep], ...], tuple[ir.Node, ...]]]:
        """A value as it is, and what it is a view or a cast of, or was before a guard of rows without a key."""
        guards: tuple[Taken[WeightStep], ...] = ()
        nodes: tuple[ir.Node, ...] = ()
        while len(nodes) <= _FURTHEST:
            yield laid, guards, nodes
            node = laid.value.producer()
            if node is None:
                return
            view = upward(laid, self._facts, selecting=True)
            if view is not None:
                laid, nodes = view, (*nodes, node)
                continue
            passed = next(((step, inner) for step, inner in self._read(node, laid) if isinstance(step, Passed)), None)
            if passed is not None:
                laid, nodes = passed[1], (*nodes, node, *passed[0].also)
                continue
            guard = self._guarded(node, laid) if guarded else None
            if guard is None:
                return
            step, laid, also = guard
            guards, nodes = (*guards, step), (*nodes, node, *also)

    def _guarded(self, node: ir.Node, laid: Laid) -> tuple[Taken[WeightStep], Laid, tuple[ir.Node, ...]] | None:
        """The weights before a guard, if the node is one."""
        reader = self._readers.weight(node)
        for value in node.inputs if reader is not None else ():
            axes = None if value is None else aligned(value, laid.axes, self._facts)
            step = None if value is None or axes is None or reader is None else reader(node, value, self._facts)
            if (
                isinstance(step, (NaNZeroed, Zeroed))
                and step.output is node.outputs[0]
                and value is not None
                and axes is not None
            ):
                also = step.also if isinstance(step, NaNZeroed) else ()
                return Taken(step, node, laid.axes), Laid(value, axes), also
        return None

    def begins_steps(self, node: ir.Node) -> bool:
        """Whether a node is a step that changes scores."""
        reader = self._readers.score(node)
        return reader is not None and any(not isinstance(step, Passed) for step in reader(node, self._facts))
