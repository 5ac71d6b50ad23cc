"""Roundings of a quantised model as one attention has them: the rounded value, its place and its type.

Those between the two products are inside: a fused operator has no place for them. Those of operands and result are outside, and
stay where they are.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.rounding import QdqPair

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
