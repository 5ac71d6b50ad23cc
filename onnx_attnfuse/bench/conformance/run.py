"""Running cases on an execution provider, and judging them: `run`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnx_attnfuse.bench.conformance import child, forms, spelled
from onnx_attnfuse.bench.conformance.inputs import case_of, spread
from onnx_attnfuse.bench.conformance.installed import Installed
from onnx_attnfuse.bench.conformance.models import feeds_of, model_of
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome, Verdict
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.options import Progress
from onnx_attnfuse.verify.apart import ProcessDied, Worker
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.runtime import Reference
from onnx_attnfuse.verify.tolerance import LOOSE, TIGHT, compare

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCES = {"float32": TIGHT, "float16": LOOSE, "bfloat16": 8 * LOOSE}
"""Relative to the magnitude of the result; bfloat16 has eight times the rounding of float16."""
_LOWEST, _AS_EXACT = 8 * LOOSE, 2
"""A provider may compute in another type than it is given; an operator is then to be about as exact as what is spelled out, if
that is as near as bfloat16 would be."""
_RUNS, _SECONDS = 7, 0.2
"""How often both models are run after the first time, in turn, and how long at most."""


def run(
    provider: Installed,
    *,
    operator: str | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    progress: Progress = lambda step, done, total: None,
) -> Conformance:
    """Runs all cases, or some.

    Args:
        provider: The execution provider.
        operator: The only operator to try, by its name among fused operators.
        dtype: The only element type to try.
        limit: The most cases to try of each operator; those that tell most come first.
        progress: Told about each case.

    Raises:
        OptionError: There is no such operator or element type.
        ProcessDied: The process cannot be started, as the execution provider ends it.
    """
    infos = [info for info in forms.operators() if operator in {None, info.key}]
    if not infos:
        names = ", ".join(info.key for info in forms.operators())
        raise OptionError(f"operator is {operator!r}; choose one of {names}")
    if dtype not in {None, *forms.DTYPES}:
        raise OptionError(f"dtype is {dtype!r}; choose {' or '.join(forms.DTYPES)}")
    asked = [(form, info) for info in infos for form in _some(info, dtype, limit)]
    found: list[Outcome] = []
    with Worker(["-m", child.__name__], dataclasses.asdict(provider)) as worker:
        for form, info in asked:
            found.append(outcome(form, info, worker))
            progress("running forms", len(found), len(asked))
    return Conformance(provider.name, dict(provider.versions), tuple(found))


def _some(info: OpInfo, dtype: str | None, limit: int | None) -> Iterator[Form]:
    found = (form for form in forms.forms(info, attributes(info)) if dtype in {None, form.dtype})
    return itertools.islice(found, limit)


def attributes(info: OpInfo) -> frozenset[str]:
    """The names of an operator's attributes, as its newest schema has them."""
    return _all_attributes().get((info.domain, info.name), frozenset())


@functools.cache
def _all_attributes() -> Mapping[tuple[str, str], frozenset[str]]:
    state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas = sorted(state.get_all_operator_schema(), key=lambda schema: schema.since_version)
    return {(schema.domain, schema.name): frozenset(schema.attributes) for schema in schemas}


def outcome(form: Form, info: OpInfo, worker: Worker) -> Outcome:
    """Runs one form of an operator in a process, and judges it."""
    case = case_of(form, info, attributes(info))
    inputs = case.inputs(DTYPES[form.dtype])
    model, feeds = model_of(case, inputs), feeds_of(inputs)
    expected = Reference(model).run(None, feeds)
    plain, plain_feeds = spelled.model_of(form, spread(form, info, inputs))
    task = {
        "fused": model.SerializeToString(),
        "fused feeds": feeds,
        "spelled": plain.SerializeToString(),
        "spelled feeds": plain_feeds,
        "runs": _RUNS,
        "seconds": _SECONDS,
    }
    try:
        answer = worker.ask(task)
        if not all("results" in item or item["final"] for item in answer.values()):
            worker.end()  # what ran before may have left too little memory
            answer = worker.ask(task)
    except ProcessDied as died:
        return Outcome(form, "unsupported", detail=str(died))
    return judged(form, answer, expected)


def judged(form: Form, answer: dict[str, Any], expected: Sequence[Array]) -> Outcome:
    """The outcome of a form.

    Args:
        form: The form.
        answer: What the process gave of the operator and of what is spelled out: results and times, or an error.
        expected: The results of the reference.
    """
    fused, plain = answer["fused"], answer["spelled"]
    plain_error = compare(expected[0], plain["results"][0], _LOWEST).relative if "results" in plain else None
    tolerance = TOLERANCES[form.dtype]
    if plain_error is not None and plain_error <= _LOWEST:
        tolerance = max(tolerance, _AS_EXACT * plain_error)
    if "results" not in fused:
        verdict: Verdict = "on-cpu" if fused["on cpu"] else "unsupported"
        return Outcome(form, verdict, plain_error=_rounded(plain_error), detail="" if verdict == "on-cpu" else fused["error"])
    comparisons = [compare(old, new, tolerance) for old, new in zip(expected, fused["results"], strict=True)]
    wrong = [f"output {place} {item.detail}" for place, item in enumerate(comparisons) if not item.equal]
    ratio = None if "ms" not in fused else statistics.median(fused["ms"]) / statistics.median(plain["ms"])
    error = max(item.relative for item in comparisons)
    return Outcome(form, "wrong" if wrong else "right", _rounded(error), _rounded(plain_error), _rounded(ratio), "; ".join(wrong))


def _rounded(number: float | None) -> float | None:
    """Two digits, which is what such numbers are worth; None for what is none."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.2g}")
