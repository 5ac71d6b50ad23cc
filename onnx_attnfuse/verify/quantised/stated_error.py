"""Holding a decoder with a quantised cache to the error that was stated when it was made, as `attnfuse verify` does."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.model_result import Verification
from onnx_attnfuse.verify.quantised.exact_check import check_quantised
from onnx_attnfuse.verify.quantised.measure import measure
from onnx_attnfuse.verify.quantised.record import CacheError, QuantisedCache
from onnx_attnfuse.verify.quantised.widening import Widen, widening
from onnx_attnfuse.verify.runtime import RuntimeRefusal

_MORE, _BESIDES, _FEWER = 1.25, 1e-3, 0.05
"""How much larger errors may be than stated, and how much fewer tokens the same, as other kernels round differently."""


def verify_quantised(source: ir.Model, result: ir.Model, record: QuantisedCache) -> Verification:
    """Runs a source and its result with a quantised cache in a loop: equal but for rounding, which costs no more than stated.

    Args:
        source: The decoder whose cache grows.
        result: The decoder with the quantised cache.
        record: The error stated of it.

    Raises:
        ModelError: One cannot be run, or the first is not the source of the second.
    """
    have = {value.name for value in (*source.graph.inputs, *source.graph.outputs)}
    loop = record.loop
    wanted = {loop.tokens, *loop.outputs, *(pair[0] for pair in (*loop.pasts, *loop.presents))}
    if missing := sorted(wanted - have):
        problem = f"the second model has a quantised cache, and the first is not what it was made of: it has no {missing[0]}"
        raise ModelError(f"{problem}; compare it with its source")
    with widening() as widen:
        return _verified(source, result, record, widen)


def _verified(source: ir.Model, result: ir.Model, record: QuantisedCache, widen: Widen) -> Verification:
    verdict = check_quantised(source, result, record, widen)
    if verdict.undecided is not None:
        raise ModelError(f"the models cannot be compared: {verdict.undecided}; run them where they were made for")
    found = Verification(False, verdict.cases, 0, (), verdict.detail, _kinds(source))
    if not verdict.equal:
        return found
    try:
        error = measure(source, result, record, widen)
    except RuntimeRefusal as refusal:
        raise ModelError(f"a model does not run: {refusal}; repair it first") from refusal
    stated = f"stated: {record.error}" if record.error is not None else "no error was stated"
    notes = f"error of the logits by the {record.format} cache: {error}", stated
    exceeded = "" if record.error is None else _exceeded(error, record.error)
    return dataclasses.replace(found, equal=not exceeded, detail=exceeded or verdict.detail, notes=notes)


def _exceeded(error: CacheError, stated: CacheError) -> str:
    """The way in which an error is larger than stated; empty where it is not."""
    for name in ("largest", "mean"):
        now, then = getattr(error, name), getattr(stated, name)
        if not now <= then * _MORE + _BESIDES:
            return f"the {name} error of the logits is {now:.3g} of their spread, and {then:.3g} was stated"
    if error.equal_tokens < stated.equal_tokens - _FEWER:
        return f"{error.equal_tokens:.1%} of greedy tokens are the same, and {stated.equal_tokens:.1%} were stated"
    return ""


def _kinds(source: ir.Model) -> tuple[tuple[str, str], ...]:
    return tuple((name, kind.name) for name, kind in kinds(source.graph, Facts(source.graph)).items())
