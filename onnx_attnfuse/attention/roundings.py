"""Roundings of a quantised model as one attention has them: the rounded value, its place and its type.

Those between the two products are inside: a fused operator has no place for them. Those of operands and result are outside, and
stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.rounding import QdqPair, quantizes, read_pair
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.uses import viewers

VIEWS = REARRANGES | REPEATS | SLICES | CASTS
_MOST_STEPS = 24
"""Operators between an operand and its projection: longer chains do not occur."""

Place: TypeAlias = Literal[
    "query", "key", "value", "mask", "scores", "scaled", "capped", "masked", "weights", "guarded", "output"
]
"""The rounded value: an operand; the scores of the product, after a scale, a soft cap, a mask; the weights as Softmax
gives them, or after some are set to 0; the result."""

OUTSIDE: frozenset[Place] = frozenset(["query", "key", "value", "mask", "output"])
"""Roundings that fused operators leave as they are, of inputs and results."""
WORDS: dict[Place, str] = {
    "query": "queries",
    "key": "keys",
    "value": "values",
    "mask": "mask",
    "scores": "scores",
    "scaled": "scaled scores",
    "capped": "capped scores",
    "masked": "masked scores",
    "weights": "weights",
    "guarded": "guarded weights",
    "output": "result",
}


@dataclasses.dataclass(frozen=True)
class Rounding:
    """One rounding in an attention or right beside it."""

    place: Place
    pair: QdqPair

    @property
    def is_inside(self) -> bool:
        """Whether a fused operator would leave it out."""
        return self.place not in OUTSIDE

    @property
    def dtype(self) -> ir.DataType | None:
        """The type that is rounded to."""
        return self.pair.dtype


def in_words(roundings: tuple[Rounding, ...]) -> str:
    """The rounded operands with their types, in words: `scores and weights to INT8`."""
    by_type: dict[str, dict[str, None]] = {}
    for item in roundings:
        name = type_name(item.dtype)
        by_type.setdefault(name, {})[WORDS[item.place]] = None
    parts = [f"{_listed(list(words))} to {name}" for name, words in by_type.items()]
    return ", ".join(parts)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A view, a factor or a rounding of a tensor."""

    before: ir.Value
    after: ir.Value
    node: ir.Node
    """The node that gives it."""
    pair: QdqPair | None = None
    factor: float | None = None


def _step(after: ir.Value, facts: Facts) -> Step | None:
    """The step that gives a value; None where another operator does."""
    node = after.producer()
    if (pair := read_pair(node, facts)) is not None:
        return Step(pair.before, after, pair.dequantize, pair)
    if is_standard(node, *VIEWS):
        return None if node.inputs[0] is None else Step(node.inputs[0], after, node)
    scaling = read_scaling(node, facts)
    return None if node is None or scaling is None else Step(scaling.tensor, after, node, factor=scaling.of(1.0))


def steps_above(value: ir.Value, facts: Facts) -> Iterator[Step]:
    """The steps by which a value comes about, the last first."""
    for _ in range(_MOST_STEPS):
        step = _step(value, facts)
        if step is None:
            return
        yield step
        value = step.before


def steps_below(value: ir.Value, facts: Facts) -> Iterator[Step]:
    """The steps that alone look at a value, and at what the one before gives."""
    for _ in range(_MOST_STEPS):
        users = [] if value.is_graph_output() else viewers(value)
        if len(users) == 1 and quantizes(users[0]):
            users = viewers(users[0].outputs[0])
        step = _step(users[0].outputs[0], facts) if len(users) == 1 else None
        if step is None or step.before is not value:
            return
        yield step
        value = step.after
