"""Readers of single steps between the two products of an attention, by operator; patterns register them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import onnx_ir as ir

from onnx_attnfuse.attention.match.steps import ScoreStep, WeightStep
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import read_as

ScoreReader: TypeAlias = Callable[[ir.Node, Facts], Sequence[ScoreStep]]
"""Says how a node changes the scores; several answers if either input may carry them, none if it cannot be read."""
WeightReader: TypeAlias = Callable[[ir.Node, ir.Value, Facts], "WeightStep | None"]
"""Reads the effect of a consumer of the attention weights."""


@dataclasses.dataclass(frozen=True)
class ScoreStepReader:
    """A reader of the effect of operators on attention scores."""

    name: str
    domain: str
    ops: tuple[str, ...]
    read: ScoreReader
    doc: str
    home: str


@dataclasses.dataclass(frozen=True)
class WeightStepReader:
    """A reader of the effect of operators on attention weights."""

    name: str
    domain: str
    ops: tuple[str, ...]
    read: WeightReader
    doc: str
    home: str


_Entry = TypeVar("_Entry", ScoreStepReader, WeightStepReader)


@dataclasses.dataclass(frozen=True)
class Readers:
    """Readers of score steps and weight steps, by domain and operator."""

    scores: Mapping[tuple[str, str], ScoreStepReader]
    weights: Mapping[tuple[str, str], WeightStepReader]

    @staticmethod
    def of(entries: Iterable[object]) -> Readers:
        """The readers among `entries`.

        Raises:
            OptionError: Two read the same operator.
        """
        found = list(entries)
        scores = [entry for entry in found if isinstance(entry, ScoreStepReader)]
        weights = [entry for entry in found if isinstance(entry, WeightStepReader)]
        return Readers(_by_operator(scores), _by_operator(weights))

    def score(self, node: ir.Node) -> ScoreReader | None:
        """The reader of this node's effect on scores, if there is one."""
        found = self.scores.get(read_as(node))
        return None if found is None else found.read

    def weight(self, node: ir.Node) -> WeightReader | None:
        """The reader of this node's effect on weights, if there is one."""
        found = self.weights.get(read_as(node))
        return None if found is None else found.read


def _by_operator(entries: Iterable[_Entry]) -> dict[tuple[str, str], _Entry]:
    found: dict[tuple[str, str], _Entry] = {}
    for entry in entries:
        for op in entry.ops:
            other = found.setdefault((entry.domain, op), entry)
            if other is not entry:
                where = f"{entry.domain or 'ai.onnx'}::{op}"
                raise OptionError(f"two patterns read {where}: {other.home} and {entry.home}; skip one of them")
    return found
