"""Judging a case in which two quantised models differ: by their numbers before any rounding at run time.

A difference of 1e-7 in front of a rounding may become one of a step, and of 1e-2 in the outputs. So the judgement is the same as
of attentions that were fused without their roundings (decision 29): both models have the same roundings, and without them
the outputs are equal to the ordinary tolerance, which is as strict as for a model of floats.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import session
from onnx_attnfuse.verify.quantised.roundings import same_roundings, without_roundings
from onnx_attnfuse.verify.runtime import PieceSession, Reference, RuntimeRefusal
from onnx_attnfuse.verify.verdict import Comparison, ErrorBounds, as_typed, compare

_FURTHER, _BESIDES = 4.0, 1e-3
"""How much further than the first model the second may be from both without roundings: an output may have only a few numbers."""


class Unrounded:
    """Two models without the roundings that both have; nothing is made before it is asked for."""

    def __init__(self, first: ir.Model, second: ir.Model) -> None:
        self._models = first, second
        self.apart = False
        """Whether to run in another process."""

    @functools.cached_property
    def _sessions(self) -> tuple[PieceSession | Reference, PieceSession | Reference] | None:
        """Both models; None where they round nothing or not the same, or do not load without it."""
        if not same_roundings(*self._models):
            return None
        with contextlib.suppress(RuntimeRefusal, ModelError):
            first, second = (session(without_roundings(model)) for model in self._models)
            return first, second
        return None

    def compared(
        self,
        inputs: tuple[Mapping[str, Array], Mapping[str, Array]],
        rounded: tuple[Sequence[Array], Sequence[Array]],
        tolerance: float | ErrorBounds,
    ) -> list[Comparison] | None:
        """The outputs without roundings, compared; None where they do not show that roundings alone make the difference.

        Args:
            inputs: The case, for each model.
            rounded: The outputs of both models as they are.
            tolerance: How far equal outputs may be apart.
        """
        if self._sessions is None:
            return None
        for one in self._sessions:
            one.apart = self.apart
        names = [value.name or "" for value in self._models[0].graph.outputs]
        try:
            old, new = (one.run(names, given) for one, given in zip(self._sessions, inputs, strict=True))
        except RuntimeRefusal:
            return None
        found = [compare(left, as_typed(right, left), tolerance) for left, right in zip(old, new, strict=True)]
        first, second = (_distance(old, results) for results in rounded)
        return found if all(result.equal for result in found) and second <= _FURTHER * first + _BESIDES else None


def _distance(exact: Sequence[Array], rounded: Sequence[Array]) -> float:
    """The mean distance of outputs from those without roundings, as a part of the spread of each."""
    parts: list[Array] = []
    for left, right in zip(exact, rounded, strict=True):
        if left.dtype.kind in "fV" and left.shape == right.shape and left.size:
            one, other = left.astype(np.float64), right.astype(np.float64)
            finite = np.isfinite(one) & np.isfinite(other)
            parts.append(np.abs(one - other)[finite] / (float(one[finite].std()) or 1.0))
    return float(np.concatenate(parts).mean()) if parts else 0.0
