"""State of the matcher while a formula is matched: operands, slots and axes bound so far; and which attempt came furthest."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.steps import ScoreStep, Taken, WeightStep
from onnx_attnfuse.language.matcher.discrimination_net import NetBranch, Variant


@dataclasses.dataclass(frozen=True)
class Bound:
    """The value or number of the graph that an operand is bound to."""

    indexed: IndexedValue | None
    """None for a number that no value of the graph holds."""
    row: int
    """The number of its rows' axis among those of the match."""
    column: int
    number: float | None = None


@dataclasses.dataclass(frozen=True)
class FilledSlot:
    """The content of a slot: steps of the graph, or factors."""

    steps: tuple[Taken[ScoreStep], ...] = ()
    number: float = 1.0
    values: tuple[tuple[IndexedValue, int], ...] = ()
    row: int = 0
    column: int = 1


@dataclasses.dataclass(frozen=True)
class MatchedGuard:
    """A step that guards the weights of fully masked rows, where the matcher met it."""

    taken: Taken[WeightStep]
    row: int
    column: int


@dataclasses.dataclass(frozen=True)
class State:
    """Bindings of operands, slots and axes so far; each match step makes a new one."""

    operands: Mapping[str, Bound] = dataclasses.field(default_factory=dict[str, Bound])
    slots: Mapping[tuple[str, ...], FilledSlot] = dataclasses.field(default_factory=dict[tuple[str, ...], FilledSlot])
    axes: Mapping[int, Axis] = dataclasses.field(default_factory=dict[int, Axis])
    guards: tuple[MatchedGuard, ...] = ()
    nodes: tuple[ir.Node, ...] = ()
    softmaxes: tuple[ir.Node, ...] = ()
    depth: int = 0
    """Operators found."""
    fresh: int = 2
    """The next number of an axis."""

    def along(self, number: int, axis: Axis) -> State | None:
        """With an axis known; None if it is known to be another."""
        known, axis = self.axes.get(number), leaves(axis)
        if known is not None:
            return self if set(leaves(known)) == set(axis) else None
        return dataclasses.replace(self, axes={**self.axes, number: axis})

    def agree(self, one: int, other: int) -> bool:
        """Whether two numbers may be one axis."""
        return one == other or None in (self.axes.get(one), self.axes.get(other)) or self.axes[one] == self.axes[other]

    def through(self, *nodes: ir.Node) -> State:
        """The match with nodes passed."""
        return dataclasses.replace(self, nodes=(*self.nodes, *nodes)) if nodes else self


@dataclasses.dataclass(frozen=True)
class Goal:
    """A value that the next token has to fit."""

    indexed: IndexedValue
    row: int
    column: int
    outer: Axis
    """All factors of what it broadcasts against, its own among them."""


@dataclasses.dataclass(frozen=True)
class Match:
    """A formula found."""

    variant: Variant
    root: IndexedValue
    state: State


@dataclasses.dataclass(frozen=True)
class Miss:
    """An attempt that ended."""

    depth: int
    """Operators found before it ended."""
    found: str
    """The node found there."""
    node: str | None
    expected: tuple[str, ...]
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        wanted = " or ".join(self.expected) or "another operand"
        return f"{self.found} where {wanted} was expected, {self.depth} operators matched"


class Trace:
    """Collects the nearest misses."""

    def __init__(self, patterns: Collection[str]) -> None:
        """Collects the misses of some patterns.

        Args:
            patterns: Their names.
        """
        self._patterns = patterns
        self.nearest: dict[ir.Node | None, Miss] = {}
        """By Softmax; under None those of attempts that met none."""

    def miss(self, depth: int, softmaxes: Sequence[ir.Node], value: ir.Value, branch: NetBranch) -> None:
        """Notes an attempt that ended at a value."""
        patterns = tuple(name for name in branch.names if name.partition("(")[0] in self._patterns)
        if not patterns:
            return
        node = value.producer()
        found = f"{node.op_type} '{node.name}'" if node is not None else f"'{value.name}'"
        made = Miss(depth, found, node.name if node is not None else None, tuple(dict.fromkeys(branch.expected())), patterns)
        for softmax in softmaxes or (None,):
            known = self.nearest.get(softmax)
            if known is None or known.depth < depth:
                self.nearest[softmax] = made
