"""Running cases on an execution provider, and judging them: `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bench.conformance import child
from onnx_attnfuse.bench.conformance.cases import (
    RARE_DTYPE,
    USUAL_DTYPES,
    Array,
    case_of,
    decomposed,
    feeds_of,
    forms,
    model_of,
    operators,
)
from onnx_attnfuse.bench.conformance.installed import Installed
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome, Verdict
from onnx_attnfuse.kernels.execution_provider import OpSupport
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.options import Progress
from onnx_attnfuse.verify.runtime import Reference
from onnx_attnfuse.verify.subprocess_runner import ProcessDied, Worker
from onnx_attnfuse.verify.verdict import LOOSE, TIGHT, compare

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCES = {"float32": TIGHT, "float16": LOOSE, "bfloat16": 8 * LOOSE}
"""Relative to the magnitude of the result; bfloat16 has eight times the rounding of float16."""
_LOWEST, _AS_EXACT = 8 * LOOSE, 2
"""A provider may compute in another type than it is given; the operator must then be about as exact as the decomposed attention,
if that is as near as bfloat16 would be."""
_LASTING = "CUDA"
"""A word of errors after which a process gives the same to whatever comes next, so that none of them is believed at once."""
_RUNS, _SECONDS = 7, 0.2
"""How often both models are run after the first time, in turn, and how long at most."""


class Process(Protocol):
    """Another process that runs pairs of models, as `onnx_attnfuse.bench.conformance.child` does, wherever it runs."""

    def ask(self, question: Any, /) -> Any:
        """The results and times of two models, or their errors."""

    def end(self) -> None:
        """Ends it; the next question starts it again."""


def run(
    provider: Installed,
    *,
    operator: str | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    progress: Progress = lambda step, done, total: None,
    process: Process | None = None,
) -> Conformance:
    """Runs all cases, or some.

    Args:
        provider: The execution provider.
        operator: The only operator to try, by its name among fused operators.
        dtype: The only element type to try.
        limit: The most cases to try of each operator; those that tell most come first.
        progress: Called for each case.
        process: The process that runs the cases, if not one of this Python; it is ended.

    Raises:
        OptionError: There is no such operator or element type.
        ProcessDied: The process cannot be started, as the execution provider ends it.
    """
    infos = _operators(provider.name, operator)
    if dtype not in {None, *DTYPES}:
        raise OptionError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    asked = [(form, info) for info in infos for form in _some(info, _dtypes(info, provider.name, dtype), limit)]
    found, said = list[Outcome](), set[str]()
    with contextlib.ExitStack() as ending:
        worker = process or Worker(["-m", child.__name__], dataclasses.asdict(provider))
        ending.callback(worker.end)
        for form, info in asked:
            found.append(outcome(form, info, worker, said))
            progress("running forms", len(found), len(asked))
    return Conformance(provider.name, dict(provider.versions), tuple(found))


def _operators(ep: str, asked: str | None) -> list[OpInfo]:
    """The operator that is asked for, or all; packed ones only where they are not known to be without a kernel.

    Raises:
        OptionError: There is no such operator.
    """
    every = operators()
    if asked is None:
        absent = ep in providers.names() and providers.provider(ep).operators.get("PackedMultiHeadAttention", "unknown") is None
        return [info for info in every if not (info.packed and absent)]
    found = [info for info in every if info.key == asked]
    if not found:
        names = ", ".join(info.key for info in every)
        raise OptionError(f"operator is {asked!r}; choose one of {names}")
    return found


def _some(info: OpInfo, dtypes: Sequence[str], limit: int | None) -> Iterator[Form]:
    return itertools.islice(forms(info, attributes(info), dtypes), limit)


def _dtypes(info: OpInfo, ep: str, asked: str | None) -> Sequence[str]:
    """The element types to try: the one asked for, or all usual ones, and bfloat16 where there is known to be a kernel for it."""
    if asked is not None:
        return (asked,)
    known = support(info.key, providers.provider(ep)) if ep in providers.names() else None
    has_rare = isinstance(known, OpSupport) and ir.DataType.BFLOAT16 in known.runs
    return (*USUAL_DTYPES, RARE_DTYPE) if has_rare else USUAL_DTYPES


def attributes(info: OpInfo) -> frozenset[str]:
    """The names of an operator's attributes, as its newest schema has them."""
    return _all_attributes().get((info.domain, info.name), frozenset())


@functools.cache
def _all_attributes() -> Mapping[tuple[str, str], frozenset[str]]:
    state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas = sorted(state.get_all_operator_schema(), key=lambda schema: schema.since_version)
    return {(schema.domain, schema.name): frozenset(schema.attributes) for schema in schemas}


def outcome(form: Form, info: OpInfo, worker: Process, said: set[str]) -> Outcome:
    """Runs one form of an operator in a process, and judges it.

    Args:
        form: The form.
        info: The record of its operator.
        worker: The process that runs it; started again where an earlier case may have changed its answer.
        said: Errors that a fresh process gave too, with no numbers in them, which are believed at once; new ones are added.
    """
    case = case_of(form, info, attributes(info))
    inputs = case.inputs(DTYPES[form.dtype])
    model, feeds = model_of(case, inputs), feeds_of(inputs)
    expected = Reference(model).run(None, feeds)
    plain, plain_feeds = decomposed(case, info, inputs)
    task = {
        "fused": model.SerializeToString(),
        "fused feeds": feeds,
        "decomposed": plain.SerializeToString(),
        "decomposed feeds": plain_feeds,
        "runs": _RUNS,
        "seconds": _SECONDS,
    }
    try:
        answer = worker.ask(task)
        if _doubts(answer, said):
            worker.end()  # what ran before may have left too little memory
            answer = worker.ask(task)
            said.update(_doubts(answer, said))
    except ProcessDied as died:
        return Outcome(form, "unsupported", detail=str(died))
    return judged(form, answer, expected)


def _doubts(answer: Mapping[str, Any], said: set[str]) -> set[str]:
    """The errors, with no numbers in them, that may come of what the process ran before."""
    errors = {re.sub(r"\d+", "#", item["error"]) for item in answer.values() if "results" not in item and not item["final"]}
    return {error for error in errors if error not in said or _LASTING in error}


def judged(form: Form, answer: dict[str, Any], expected: Sequence[Array]) -> Outcome:
    """The outcome of a form.

    Args:
        form: The form.
        answer: The process's answer for the operator and for the decomposed attention: results and times, or an error.
        expected: The results of the reference.
    """
    fused, plain = answer["fused"], answer["decomposed"]
    asked, (empty, *_) = _apart(form, expected)
    plain_error, plain_empty = None, None
    if "results" in plain:
        (other,), (plain_empty,) = _apart(form, [plain["results"][0].reshape(expected[0].shape)])
        plain_error = compare(asked[0], other, _LOWEST).relative
    tolerance = TOLERANCES[form.dtype]
    if plain_error is not None and plain_error <= _LOWEST:
        tolerance = max(tolerance, _AS_EXACT * plain_error)
    if "results" not in fused:
        verdict: Verdict = "on-cpu" if fused["on cpu"] else "unsupported"
        return Outcome(form, verdict, plain_error=_rounded(plain_error), detail="" if verdict == "on-cpu" else fused["error"])
    found, (own_empty, *_) = _apart(form, fused["results"])
    comparisons = [compare(old, new, tolerance) for old, new in zip(asked, found, strict=True)]
    wrong = [f"output {place} {item.detail}" for place, item in enumerate(comparisons) if not item.equal]
    ratio = None if "ms" not in fused else statistics.median(fused["ms"]) / statistics.median(plain["ms"])
    error = max(item.relative for item in comparisons)
    if not wrong and own_empty is not None:
        detail = f"a row without a key gives {_word(own_empty, (empty, plain_empty), tolerance)}"
        return Outcome(form, "right", _rounded(error), _rounded(plain_error), _rounded(ratio), detail)
    return Outcome(form, "wrong" if wrong else "right", _rounded(error), _rounded(plain_error), _rounded(ratio), "; ".join(wrong))


def _apart(form: Form, results: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
    """Results without the row that sees no key, and that row; there is no right answer in it."""
    if form.bias != "empty" or results[0].ndim not in {2, 3}:
        return list(results), [None]
    place, axis = (form.rows - 1, 0) if results[0].ndim == 2 else (form.rows - 1, 1)  # tokens, or entries and rows
    return [np.delete(results[0], place, axis), *results[1:]], [np.take(results[0], place, axis)]


def _word(row: Array, means: Sequence[Array | None], tolerance: float) -> str:
    """The word for an operator's result in a row without a key."""
    if np.isnan(row).any():
        return "NaN"
    if not row.any():
        return "0"
    is_mean = any(mean is not None and mean.any() and compare(mean, row, tolerance).equal for mean in means)
    return "the mean of the values" if is_mean else "something else"


def _rounded(number: float | None) -> float | None:
    """Two digits, the precision of such numbers; None for none."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.2g}")


_NONE = "-"


def lines(table: Conformance) -> Iterator[tuple[str, ...]]:
    """Operator, element type, how many forms have which verdict, errors of right ones, and the middle of their times.

    Errors are parts of the magnitude of the result, the second of the decomposed attention; times are parts of its
    time.
    """
    for (op, dtype), cases in _grouped(table.cases):
        counts = [sum(case.verdict == verdict for case in cases) for verdict in get_args(Verdict)]
        right = [case for case in cases if case.verdict == "right"]
        errors = [case.error for case in right if case.error is not None]
        plain = [case.plain_error for case in cases if case.plain_error is not None]
        ratios = [case.ratio for case in right if case.ratio is not None]
        largest = [f"{max(found):.1e}" if found else _NONE for found in (errors, plain)]
        yield op, dtype, *map(str, counts), *largest, f"{statistics.median(ratios):.2f}" if ratios else _NONE


def failures(table: Conformance) -> Iterator[str]:
    """A line for each way to fail: verdict, how many forms of an operator, the first of them, and what was said of it."""
    found: dict[tuple[str, ...], list[Outcome]] = {}
    for case in table.cases:
        if case.verdict != "right":
            said = re.sub(r"[-\d.e+]+", "#", case.detail) if case.verdict == "unsupported" else ""
            found.setdefault((case.verdict, case.form.op, case.form.dtype, said), []).append(case)
    for (verdict, *_), cases in found.items():
        detail = f": {cases[0].detail}" if cases[0].detail else ""
        yield f"{verdict} x{len(cases)}, first {cases[0].form.name}{detail}"


def _grouped(cases: Iterable[Outcome]) -> Iterator[tuple[tuple[str, str], list[Outcome]]]:
    def key(case: Outcome) -> tuple[str, str]:
        return case.form.op, case.form.dtype

    for found, group in itertools.groupby(sorted(cases, key=key), key):
        yield found, list(group)
