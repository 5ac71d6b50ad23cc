"""Holding a model to the error that was stated when it was made, of a quantised cache or of roundings left out.

Of attentions that were fused without their roundings two questions are asked apart, as of a quantised cache. *Is it right?*
Source and result, both without any rounding of values computed at run time, must give the same; so no rounding that falls another
way is taken for a difference. And each rounding that the result still has must be one of the source. *What does it cost?* Both
run as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify.compare_models import check_models, outputs_of_both
from onnx_attnfuse.verify.float32_copy import widening
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.quantised.cache import check_quantised, measure
from onnx_attnfuse.verify.quantised.roundings import (
    CacheError,
    DequantisedAttention,
    OutputError,
    QuantisedCache,
    added_roundings,
    without_roundings,
)
from onnx_attnfuse.verify.runtime import RuntimeRefusal
from onnx_attnfuse.verify.verdict import Verdict, Verification

_Both: TypeAlias = "tuple[list[Array], list[Array]]"
_MORE, _BESIDES, _FEWER = 1.25, 1e-3, 0.05
"""How much larger errors may be than stated, and how much fewer tokens the same, as other kernels round differently."""


def verify_stated(source: ir.Model, result: ir.Model) -> Verification | None:
    """Whether a result equals its source but for rounding, which costs no more than it states; None where it states nothing.

    Args:
        source: The decoder whose cache grows, or the quantised model.
        result: The decoder with a quantised cache, or the model with attentions fused without the roundings inside.

    Raises:
        ModelError: One cannot be run, or the first is not the source of the second.
    """
    if (cache := QuantisedCache.read(result.metadata_props)) is not None:
        return _verified_cache(source, result, cache)
    if (left_out := DequantisedAttention.read(result.metadata_props)) is not None:
        return _verification(source, check_dequantised(source, result), lambda: _roundings(source, result, left_out))
    return None


def _verification(source: ir.Model, verdict: Verdict, measured: Callable[[], tuple[str, tuple[str, ...]]]) -> Verification:
    """A verdict with the way in which a measured error is larger than stated, and lines on it.

    Raises:
        ModelError: Nothing could be compared.
    """
    if verdict.undecided is not None:
        raise ModelError(f"the models cannot be compared: {verdict.undecided}; run them where they were made for")
    named = tuple((name, kind.name) for name, kind in kinds(source.graph, Facts(source.graph)).items())
    found = Verification(False, verdict.cases, 0, (), verdict.detail, named)
    if not verdict.equal:
        return found
    exceeded, notes = measured()
    return dataclasses.replace(found, equal=not exceeded, detail=exceeded or verdict.detail, notes=notes)


def _verified_cache(source: ir.Model, result: ir.Model, record: QuantisedCache) -> Verification:
    have = {value.name for value in (*source.graph.inputs, *source.graph.outputs)}
    loop = record.loop
    wanted = {loop.tokens, *loop.outputs, *(pair[0] for pair in (*loop.pasts, *loop.presents))}
    if missing := sorted(wanted - have):
        problem = f"the second model has a quantised cache, and the first is not what it was made of: it has no {missing[0]}"
        raise ModelError(f"{problem}; compare it with its source")

    with widening() as widen:

        def measured() -> tuple[str, tuple[str, ...]]:
            try:
                error = measure(source, result, record, widen)
            except RuntimeRefusal as refusal:
                raise ModelError(f"a model does not run: {refusal}; repair it first") from refusal
            notes = f"error of the logits by the {record.format} cache: {error}", _stated(record.error)
            exceeded = _exceeded("error of the logits", [(error, record.error)])
            if not exceeded and record.error is not None and error.equal_tokens < record.error.equal_tokens - _FEWER:
                exceeded = (
                    f"{error.equal_tokens:.1%} of greedy tokens are the same, and {record.error.equal_tokens:.1%} were stated"
                )
            return exceeded, notes

        return _verification(source, check_quantised(source, result, record, widen), measured)


def _roundings(source: ir.Model, result: ir.Model, then: DequantisedAttention) -> tuple[str, tuple[str, ...]]:
    now = measure_dequantised(source, result, then)
    pairs = [(now.error, then.error), (now.result_error, then.result_error)]
    exceeded, before, after = _exceeded("difference of the outputs", pairs), now.source_error, now.result_error
    if not exceeded and before is not None and after is not None and not _holds(after.mean, before.mean):
        numbers = f"{after.mean:.3g}, and not {before.mean:.3g}"
        exceeded = f"the outputs are further from those without roundings than the source's: {numbers}"
    return exceeded, (*now.lines(), _stated(then.error))


def _stated(error: CacheError | OutputError | None) -> str:
    return "no error was stated" if error is None else f"stated: {error}"


def _exceeded(what: str, pairs: Iterable[tuple[CacheError | OutputError | None, CacheError | OutputError | None]]) -> str:
    """The way in which an error is larger than the one stated beside it; empty where none is."""
    known = [(now, then) for now, then in pairs if now is not None and then is not None]
    for name in ("largest", "mean"):
        for found, stated in ((getattr(now, name), getattr(then, name)) for now, then in known):
            if not _holds(found, stated):
                return f"the {name} {what} is {found:.3g} of their spread, and {stated:.3g} was stated"
    return ""


def _holds(found: float, bound: float) -> bool:
    return found <= bound * _MORE + _BESIDES


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
        return Verdict(False, 0.0, 0, f"the second model has roundings that are not in the first: {added}")
    verdict = check_models(without_roundings(source), without_roundings(result))
    return dataclasses.replace(verdict, detail=f"{verdict.detail}, both without roundings")
