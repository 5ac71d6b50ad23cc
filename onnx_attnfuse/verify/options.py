"""How whole models are compared; the command line is derived from these fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnx_attnfuse.options import Choices


@dataclasses.dataclass(frozen=True)
class Trials(Choices):
    """Choices for comparing two models."""

    cases: int | None = None
    """Number of cases to run. Default: each kind of padding and each encoding of a mask once, in three choices of sizes."""
    seed: int = 0
    """Seed of the random numbers."""
    round_float16: bool = False
    """Round each float16 result as a GPU does; ONNX Runtime's CPU provider rounds only the last of a chain. Use it for
    float16 models made for a GPU, which otherwise differ in fully masked rows."""
    dim: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Size of a symbolic dimension, as NAME=N. Other sizes are chosen to fit."""
    tolerance: float | None = None
    """Largest error, as a share of the output's largest number. Default: 1e-3; 5e-2 for float16, 2e-1 for bfloat16."""
    atol: float | None = None
    """Compare element by element: the largest absolute error. Replaces the tolerance."""
    rtol: float | None = None
    """Compare element by element: the largest error relative to the first model. Replaces the tolerance."""
