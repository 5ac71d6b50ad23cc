"""A table of conformance for a reader: a line for each operator and element type, and what failed, the like together."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator
from typing import get_args

from onnx_attnfuse.kernels.conformance import Conformance, Outcome, Verdict

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
