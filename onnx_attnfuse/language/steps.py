"""Steps between Q·Kᵀ and Softmax, and between Softmax and the product with the values, as readers of steps return them.

A *step reader* looks at one node and says which of its inputs carries the scores and what it does to them; it becomes one by
`score_step` or `weight_step`.
"""

from __future__ import annotations

from onnx_attnfuse.attention.match.normal_form import renormalized
from onnx_attnfuse.attention.match.softmax import maximum_of
from onnx_attnfuse.attention.match.steps import (
    Added,
    Floored,
    Kept,
    LowZeroed,
    NaNZeroed,
    Negated,
    Passed,
    Renormalized,
    Replaced,
    Rounded,
    RoundedWeights,
    Scaled,
    ScoreStep,
    Shifted,
    Squashed,
    Voided,
    Weighted,
    WeightStep,
    Zeroed,
)
from onnx_attnfuse.graph.rounding import read_pair, same_rounded
from onnx_attnfuse.graph.sweep import is_whole
from onnx_attnfuse.graph.thresholds import NO_EXPONENTIAL

__all__ = [
    "NO_EXPONENTIAL",
    "Added",
    "Floored",
    "Kept",
    "LowZeroed",
    "NaNZeroed",
    "Negated",
    "Passed",
    "Renormalized",
    "Replaced",
    "Rounded",
    "RoundedWeights",
    "Scaled",
    "ScoreStep",
    "Shifted",
    "Squashed",
    "Voided",
    "WeightStep",
    "Weighted",
    "Zeroed",
    "is_whole",
    "maximum_of",
    "read_pair",
    "renormalized",
    "same_rounded",
]
