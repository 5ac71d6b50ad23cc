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
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify.compare_models import check_models, outputs_of_both
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_result import Verification
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention, OutputError, added_roundings, without_roundings
from onnx_attnfuse.verify.verdict import Verdict

_MORE, _BESIDES = 1.25, 1e-3
"""How much larger errors may be than stated, as other kernels round differently."""
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


def verify_dequantised(source: ir.Model, result: ir.Model, record: DequantisedAttention) -> Verification:
    """Runs a source and its result, both without roundings and both as they are: the error may be no larger than stated.

    Args:
        source: The quantised model.
        result: The model whose attentions were fused without the roundings inside.
        record: The error stated of it.

    Raises:
        ModelError: One cannot be run.
    """
    verdict = check_dequantised(source, result)
    if verdict.undecided is not None:
        raise ModelError(f"the models cannot be compared: {verdict.undecided}; run them where they were made for")
    named = tuple((name, kind.name) for name, kind in kinds(source.graph, Facts(source.graph)).items())
    found = Verification(False, verdict.cases, 0, (), verdict.detail, named)
    if not verdict.equal:
        return found
    now = measure_dequantised(source, result, record)
    larger = _exceeded(now, record)
    stated = "no error was stated" if record.error is None else f"stated: {record.error}"
    return dataclasses.replace(found, equal=not larger, detail=larger or verdict.detail, notes=(*now.lines(), stated))


def _exceeded(now: DequantisedAttention, then: DequantisedAttention) -> str:
    """The way in which differences are larger than stated, or than those of the source; empty where they are not."""
    for name in ("largest", "mean"):
        for what in ("error", "result_error"):
            found, stated = getattr(now, what), getattr(then, what)
            if found is not None and stated is not None and not _holds(getattr(found, name), getattr(stated, name)):
                numbers = f"{getattr(found, name):.3g} of their spread, and {getattr(stated, name):.3g} was stated"
                return f"the {name} difference of the outputs is {numbers}"
    before, after = now.source_error, now.result_error
    if before is not None and after is not None and not _holds(after.mean, before.mean):
        return (
            f"the outputs are further from those without roundings than the source's: {after.mean:.3g}, and not {before.mean:.3g}"
        )
    return ""


def _holds(found: float, bound: float) -> bool:
    return found <= bound * _MORE + _BESIDES
