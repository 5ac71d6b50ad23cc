"""Upward traversal of a graph from a value: the steps, factors, views and guards that compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, upward
from onnx_attnfuse.attention.match.steps import (
    Added,
    Floored,
    NaNZeroed,
    Negated,
    Passed,
    Readers,
    Replaced,
    Scaled,
    ScoreStep,
    Shifted,
    Taken,
    WeightStep,
    Zeroed,
)
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language.matcher.match_state import FilledSlot

_MAX_VIEW_CHAIN = 24
_OF_KIND: Mapping[str, tuple[type, ...]] = {"scale": (Scaled, Negated), "mask": (Added, Replaced, Floored, Shifted)}


class Traversal:
    """Goes up in one graph."""

    def __init__(self, facts: Facts, readers: Readers) -> None:
        self._facts = facts
        self._readers = readers

    def stripped(self, indexed: IndexedValue) -> IndexedValue:
        """A value without views and casts."""
        *_, (indexed, _, _) = self.steps(indexed, set())
        return indexed

    def steps(
        self, indexed: IndexedValue, kinds: set[str]
    ) -> Iterator[tuple[IndexedValue, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]]:
        """Values before runs of steps of some kinds, with these steps in graph order: no step, one, two, ...; each value once."""
        pending: list[tuple[IndexedValue, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]] = [(indexed, (), ())]
        seen: set[ir.Value] = set()
        while pending:
            indexed, steps, nodes = pending.pop()
            node = indexed.value.producer()
            if indexed.value in seen:
                continue
            seen.add(indexed.value)
            yield indexed, steps, nodes
            if node is None or len(nodes) > _MAX_VIEW_CHAIN:
                continue
            view = upward(indexed, self._facts, selecting=True)
            if view is not None:
                pending.append((view, steps, (*nodes, node)))
                continue
            for step, inner in reversed(self._read(node, indexed)):
                also = step.also if isinstance(step, (Passed, Shifted)) else ()
                if isinstance(step, Passed):
                    pending.append((inner, steps, (*nodes, node, *also)))
                elif any(isinstance(step, _OF_KIND[kind]) for kind in kinds):
                    taken: Taken[ScoreStep] = Taken(step, node, indexed.axes)
                    pending.append((inner, (taken, *steps), (*nodes, node, *also)))

    def _read(self, node: ir.Node, indexed: IndexedValue) -> list[tuple[ScoreStep, IndexedValue]]:
        """The steps that a node may be on scores, each with the scores before it; those that lack no axis first."""
        reader = self._readers.score(node)
        found: list[tuple[int, ScoreStep, IndexedValue]] = []
        for step in reader(node, self._facts) if reader is not None else ():
            axes = aligned(step.scores, indexed.axes, self._facts)
            if axes is not None:
                lost = sum(bool(old) for old in indexed.axes) - sum(bool(new) for new in axes)
                found.append((lost, step, IndexedValue(step.scores, axes)))
        return [(step, inner) for lost, step, inner in sorted(found, key=lambda item: item[0]) if not lost]

    def factors(self, indexed: IndexedValue) -> Iterator[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]]:
        """Values before maximal runs of multiplications and divisions, with what they multiply by."""
        pending: list[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]] = [(indexed, FilledSlot(), ())]
        seen: set[ir.Value] = set()
        while pending:
            indexed, filled, nodes = pending.pop()
            if indexed.value in seen:
                continue
            seen.add(indexed.value)
            further = self._before_factor(indexed, filled, nodes) if len(nodes) <= _MAX_VIEW_CHAIN else []
            if not further:
                yield indexed, filled, nodes
            pending += reversed(further)

    def _before_factor(
        self, indexed: IndexedValue, filled: FilledSlot, nodes: tuple[ir.Node, ...]
    ) -> list[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]]:
        """The values before one node that scales, negates or passes them on; none before any other node."""
        node = indexed.value.producer()
        if node is None:
            return []
        view = upward(indexed, self._facts, selecting=True)
        if view is not None:
            return [(view, filled, (*nodes, node))]
        found: list[tuple[IndexedValue, FilledSlot, tuple[ir.Node, ...]]] = []
        for step, inner in self._read(node, indexed):
            if isinstance(step, Passed):
                return [(inner, filled, (*nodes, node, *step.also))]
            if isinstance(step, Negated):
                found.append((inner, dataclasses.replace(filled, number=-filled.number), (*nodes, node)))
            elif isinstance(step, Scaled):
                found.append((inner, self._times(filled, step, indexed), (*nodes, node)))
        return found

    def _times(self, filled: FilledSlot, step: Scaled, indexed: IndexedValue) -> FilledSlot:
        number, sign = self._facts.number(step.operand), -1 if step.divide else 1
        if number:
            return dataclasses.replace(filled, number=filled.number * number**sign)
        axes = aligned(step.operand, indexed.axes, self._facts) or ()
        return dataclasses.replace(filled, values=(*filled.values, (IndexedValue(step.operand, axes), sign)))

    def opened(
        self, indexed: IndexedValue, *, guarded: bool
    ) -> Iterator[tuple[IndexedValue, tuple[Taken[WeightStep], ...], tuple[ir.Node, ...]]]:
        """A value as it is, and what it is a view or a cast of, or was before a guard of rows without a key."""
        guards: tuple[Taken[WeightStep], ...] = ()
        nodes: tuple[ir.Node, ...] = ()
        while len(nodes) <= _MAX_VIEW_CHAIN:
            yield indexed, guards, nodes
            node = indexed.value.producer()
            if node is None:
                return
            view = upward(indexed, self._facts, selecting=True)
            if view is not None:
                indexed, nodes = view, (*nodes, node)
                continue
            passed = next(((step, inner) for step, inner in self._read(node, indexed) if isinstance(step, Passed)), None)
            if passed is not None:
                indexed, nodes = passed[1], (*nodes, node, *passed[0].also)
                continue
            guard = self._guarded(node, indexed) if guarded else None
            if guard is None:
                return
            step, indexed, also = guard
            guards, nodes = (*guards, step), (*nodes, node, *also)

    def _guarded(
        self, node: ir.Node, indexed: IndexedValue
    ) -> tuple[Taken[WeightStep], IndexedValue, tuple[ir.Node, ...]] | None:
        """The weights before a guard, if the node is one."""
        reader = self._readers.weight(node)
        for value in node.inputs if reader is not None else ():
            axes = None if value is None else aligned(value, indexed.axes, self._facts)
            step = None if value is None or axes is None or reader is None else reader(node, value, self._facts)
            if (
                isinstance(step, (NaNZeroed, Zeroed))
                and step.output is node.outputs[0]
                and value is not None
                and axes is not None
            ):
                also = step.also if isinstance(step, NaNZeroed) else ()
                return Taken(step, node, indexed.axes), IndexedValue(value, axes), also
        return None

    def begins_steps(self, node: ir.Node) -> bool:
        """Whether a node is a step that changes scores."""
        reader = self._readers.score(node)
        return reader is not None and any(not isinstance(step, Passed) for step in reader(node, self._facts))
