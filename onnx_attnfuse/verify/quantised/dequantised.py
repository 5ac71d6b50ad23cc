"""Attentions that were fused without their roundings: whether they are right but for these, and the error of that.

Two questions are asked apart, as of a quantised cache. *Is it right?* Source and result, both without any rounding of values
computed at run time, must give the same; so no rounding that falls another way is taken for a difference. And each rounding that
the result still has must be one of the source. *What does it cost?* Both run as they are.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.verify.compare_models import check_models, outputs_of_both
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention, OutputError, added_roundings, without_roundings
from onnx_attnfuse.verify.verdict import Verdict

_Both: TypeAlias = "tuple[list[Array], list[Array]]"


def measure_dequantised(source: ir.Model, result: ir.Model, record: DequantisedAttention) -> DequantisedAttention:
    """The record with measurements: source, result, and the source without any rounding, each beside each.

    Raises:
        ModelError: The source or the result cannot be run.
    """
    error = _difference(source, result)
    plain = without_roundings(source)
    try:
        before, after = (_difference(plain, model) for model in (source, result))
    except ModelError:
        before = after = None
    return dataclasses.replace(record, error=error, source_error=before, result_error=after)


def _difference(first: ir.Model, second: ir.Model) -> OutputError | None:
    """How far the outputs of the second are from those of the first, in rows that see a key; None where nothing is of floats."""
    found: dict[str, _Both] = {}
    cases = 0
    for pairs in outputs_of_both(first, second):
        cases += 1
        for name, (old, new) in pairs.items():
            if old.dtype.kind in "fV" and old.shape == new.shape:
                both = found.setdefault(name, ([], []))
                both[0].append(old.astype(np.float64).ravel())
                both[1].append(new.astype(np.float64).ravel())
    parts = [errors for both in found.values() if (errors := _shares(both)).size]
    if not parts:
        return None
    errors = np.concatenate(parts)
    return OutputError(float(errors.max()), float(errors.mean()), cases)


def _shares(both: _Both) -> Array:
    """The differences of one output, each as a part of its spread."""
    old, new = (np.concatenate(arrays) for arrays in both)
    finite = np.isfinite(old) & np.isfinite(new)
    if not finite.any():
        return old[:0]
    difference: Array = np.abs(old - new)[finite] / (float(old[finite].std()) or 1.0)
    return difference


def check_dequantised(source: ir.Model, result: ir.Model) -> Verdict:
    """Whether a result equals its source but for roundings that are left out.

    Raises:
        ModelError: A model cannot be read.
    """
    added = added_roundings(source, result)
    if added:
        return Verdict(False, 0.0, 0, f"{added} roundings of the second model are none of the first")
    verdict = check_models(without_roundings(source), without_roundings(result))
    return dataclasses.replace(verdict, detail=f"{verdict.detail}, both without roundings")
