"""How whole models are compared; the command line is derived from these fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnx_attnfuse.options import Choices


@dataclasses.dataclass(frozen=True)
class Trials(Choices):
    """Choices for comparing two models."""

    cases: int | None = None
    """Inputs to run; by default each kind of padding and each encoding of a mask once, over three choices of sizes."""
    seed: int = 0
    """Draws other numbers."""
    round_float16: bool = False
    """Round every result of float16 before it is read, as a GPU does; ONNX Runtime's CPU provider rounds the last of a chain
    only. Models for a GPU differ in rows without a key if they are compared without it."""
    dim: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Length of a symbolic dimension, as NAME=N; others are chosen such that they fit."""
    tolerance: float | None = None
    """Largest error as a part of the magnitude of an output; by default 1e-3, where a model computes in float16 5e-2, in
    bfloat16 2e-1."""
    atol: float | None = None
    """Judge by element: largest absolute error, in place of the tolerance."""
    rtol: float | None = None
    """Judge by element: largest error as a part of the first model's, in place of the tolerance."""
