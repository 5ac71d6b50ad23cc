"""Comparing two results: NaN as NaN, infinities equal, everything else within a tolerance relative to the result's magnitude.

The magnitude is that of the whole result, not of each element: attention averages values, so the error of an element that happens
to cancel out is that of its neighbours.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from onnx_attnfuse.thresholds import LEAST_SUM
from onnx_attnfuse.verify.inputs import Array

TIGHT = 1e-4
"""float32: fused and unfused differ by 1e-6 of the magnitude, with large logits by 2e-5; a mask entry of 64 makes 1e-2."""
LOOSE = 5e-3
"""float16: the unfused nodes round scores of 4 to 2e-3 and the result to 5e-4 each time, the operator once: 7e-4 apart."""


@dataclasses.dataclass(frozen=True)
class ErrorBounds:
    """How far an element may be off: by `absolute`, and by a part of itself."""

    absolute: float
    relative: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two arrays are apart."""

    equal: bool
    max_abs_error: float
    """Over all elements that are finite in both."""
    relative: float
    """`max_abs_error` as a part of the magnitude of the result."""
    detail: str
    """The differences and where; empty if there are none."""
    telling: bool = True
    """Whether the first array has an element that is a number."""
    nan_lost: int = 0
    """Elements that are NaN in the first only."""
    nan_found: int = 0
    """Elements that are NaN in the second only."""


def compare(old: Array, new: Array, tolerance: float | ErrorBounds) -> Comparison:
    """Judges `new` against `old`; a tolerance that is a number is a part of the magnitude of `old`."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return Comparison(False, np.inf, np.inf, f"{old.dtype.name} {list(old.shape)} became {new.dtype.name} {list(new.shape)}")
    if old.dtype.kind not in "fV":
        return _exact(old, new)
    left, right = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(left) & np.isfinite(right)
    same = finite | (np.isnan(left) & np.isnan(right)) | (left == right)
    error = np.abs(np.where(finite, left, 0) - np.where(finite, right, 0))
    magnitude = max(float(np.abs(left[finite]).max(initial=0.0)), LEAST_SUM) if left[finite].any() else 1.0
    largest = float(error.max(initial=0.0))
    wrong = ~same | (error > _allowed(tolerance, left, magnitude))
    lost, found = np.isnan(left), np.isnan(right)
    if not wrong.any():
        return Comparison(True, largest, largest / magnitude, "", telling=not bool(np.isnan(left).all()))
    worst = np.where(same, error, np.inf).argmax() if not same.all() else error.argmax()
    detail = _at(old, new, int(worst), int(wrong.sum()))
    apart = int((lost & ~found).sum()), int((found & ~lost).sum())
    return Comparison(False, largest, largest / magnitude, detail, nan_lost=apart[0], nan_found=apart[1])


def _allowed(tolerance: float | ErrorBounds, array: Array, magnitude: float) -> Array:
    """How far each element may be off."""
    if isinstance(tolerance, ErrorBounds):
        return tolerance.absolute + tolerance.relative * np.abs(np.where(np.isfinite(array), array, 0))
    return np.asarray(tolerance * magnitude)


def _exact(old: Array, new: Array) -> Comparison:
    wrong = old != new
    if not wrong.any():
        return Comparison(True, 0.0, 0.0, "")
    return Comparison(False, np.inf, np.inf, _at(old, new, int(wrong.argmax()), int(wrong.sum())))


def _at(old: Array, new: Array, index: int, count: int) -> str:
    place = [int(item) for item in np.unravel_index(index, old.shape)]
    return f"at {place} {_number(old, index)} became {_number(new, index)}; {count} of {old.size} elements differ"


def _number(array: Array, index: int) -> str:
    return f"{float(array.reshape(-1)[index]):.6g}"


def as_typed(array: Array, other: Array) -> Array:
    """A float array in the float type of another."""
    return array.astype(other.dtype) if array.dtype.kind in "fV" and other.dtype.kind in "fV" else array
