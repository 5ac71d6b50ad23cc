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


class Ascent:
    """Goes up in one graph."""

    def __init__(self, facts: Facts, readers: Readers) -> None:
        self._facts = facts
        self._readers = readers

    def stripped(self, laid: Laid) -> Laid:
        """A value without views and casts."""
        *_, (laid, _, _) = self.steps(laid, set())
        return laid

    def steps(self, laid: Laid, kinds: set[str]) -> Iterator[tuple[Laid, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]]:
        """What stands before steps of some kinds: none of them, one, two, ...; the steps first one first, each value once."""
        pending: list[tuple[Laid, tuple[Taken[ScoreStep], ...], tuple[ir.Node, ...]]] = [(laid, (), ())]
        seen: set[ir.Value] = set()
        while pending:
            laid, steps, nodes = pending.pop()
            node = laid.value.producer()
            if laid.value in seen:
                continue
            seen.add(laid.value)
            yield laid, steps, nodes
            if node is None or len(nodes) > _FURTHEST:
                continue
            view = upward(laid, self._facts, selecting=True)
            if view is not None:
                pending.append((view, steps, (*nodes, node)))
                continue
            for step, inner in reversed(self._read(node, laid)):
                also = step.also if isinstance(step, (Passed, Shifted)) else ()
                if isinstance(step, Passed):
                    pending.append((inner, steps, (*nodes, node, *also)))
                elif any(isinstance(step, _OF_KIND[kind]) for kind in kinds):
                    taken: Taken[ScoreStep] = Taken(step, node, laid.axes)
                    pending.append((inner, (taken, *steps), (*nodes, node, *also)))

    def _read(self, node: ir.Node, laid: Laid) -> list[tuple[ScoreStep, Laid]]:
        """What a node does to scores, with the scores before it; those that lack no axis first."""
        reader = self._readers.score(node)
        found: list[tuple[int, ScoreStep, Laid]] = []
        for step in reader(node, self._facts) if reader is not None else ():
            axes = aligned(step.scores, laid.axes, self._facts)
            if axes is not None:
                lost = sum(bool(old) for old in laid.axes) - sum(bool(new) for new in axes)
                found.append((lost, step, Laid(step.scores, axes)))
        return [(step, inner) for lost, step, inner in sorted(found, key=lambda item: item[0]) if not lost]

    def factors(self, laid: Laid) -> Iterator[tuple[Laid, Filled, tuple[ir.Node, ...]]]:
        """What stands before multiplications and divisions, as far as they go and no further, with what they multiply by."""
        pending: list[tuple[Laid, Filled, tuple[ir.Node, ...]]] = [(laid, Filled(), ())]
        seen: set[ir.Value] = set()
        while pending:
            laid, filled, nodes = pending.pop()
            if laid.value in seen:
                continue
            seen.add(laid.value)
            further = self._before_factor(laid, filled, nodes) if len(nodes) <= _FURTHEST else []
            if not further:
                yield laid, filled, nodes
            pending += reversed(further)

    def _before_factor(
        self, laid: Laid, filled: Filled, nodes: tuple[ir.Node, ...]
    ) -> list[tuple[Laid, Filled, tuple[ir.Node, ...]]]:
        """What one node multiplies or divides, or shows as it is; nothing if it does something else."""
        node = laid.value.producer()
        if node is None:
            return []
        view = upward(laid, self._facts, selecting=True)
        if view is not None:
            return [(view, filled, (*nodes, node))]
        found: list[tuple[Laid, Filled, tuple[ir.Node, ...]]] = []
        for step, inner in self._read(node, laid):
            if isinstance(step, Passed):
                return [(inner, filled, (*nodes, node, *step.also))]
            if isinstance(step, Negated):
                found.append((inner, dataclasses.replace(filled, number=-filled.number), (*nodes, node)))
            elif isinstance(step, Scaled):
                found.append((inner, self._times(filled, step, laid), (*nodes, node)))
        return found

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
