"""A table of conformance as one page: for each operator its forms by kind and size, coloured by what came of them.

text = page(table)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from onnx_attnfuse.kernels.conformance import USUAL_HEADS, Conformance, Form, Outcome, Verdict
from onnx_attnfuse.report.html import templates

_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "unsupported", "on-cpu", "right")
WORDS: Mapping[Verdict, str] = {"right": "right", "wrong": "wrong", "unsupported": "refused", "on-cpu": "on the CPU"}
"""Verdicts for a reader."""
_MANY, _USUAL_HEAD_SIZE = 100, 64
SIZES = ("few rows", "many rows", "one row on a cache", "rows on a cache", "odd number of heads", "other head sizes")
"""Classes of sizes: the columns."""


@dataclasses.dataclass(frozen=True)
class FormCell:
    """The outcomes of the forms of one kind in one class of sizes."""

    outcomes: Sequence[Outcome]

    @property
    def worst(self) -> Verdict:
        """The verdict that colours it."""
        found = {outcome.verdict for outcome in self.outcomes}
        return next(verdict for verdict in _WORST_FIRST if verdict in found)

    @property
    def words(self) -> str:
        """How many forms have the worst verdict, of how many."""
        count = sum(outcome.verdict == self.worst for outcome in self.outcomes)
        of = "" if count == len(self.outcomes) else f" of {len(self.outcomes)}"
        return f"{WORDS[self.worst]} {count}{of}"

    @property
    def reported(self) -> list[Outcome]:
        """The outcomes that are reported."""
        return [outcome for outcome in self.outcomes if outcome.detail]


@dataclasses.dataclass(frozen=True)
class Line:
    """A kind of attention in an element type, with a cell for each class of sizes; None: nothing of it was tried."""

    kind: str
    dtype: str
    cells: tuple[FormCell | None, ...]


def size_of(form: Form) -> str:
    """The class of sizes of a form."""
    if form.cached:
        return "one row on a cache" if form.rows == 1 else "rows on a cache"
    if form.rows >= _MANY:
        return "many rows"
    if form.heads != USUAL_HEADS:
        return "odd number of heads"
    return "few rows" if form.head_size == _USUAL_HEAD_SIZE else "other head sizes"


def _kind(form: Form) -> str:
    mask = {"none": "no mask", "bias": f"bias, {form.bias}", "raw": "0 and 1", "ranges": "lengths with offsets"}.get(
        form.mask, form.mask
    )
    marks = [name for name in ("causal", "windowed", "grouped", "capped") if getattr(form, name)]
    return ", ".join([mask, *marks])


def lines_of(outcomes: Iterable[Outcome]) -> list[Line]:
    """The lines of one operator, in the order in which its forms were tried."""
    found: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        line = found.setdefault((_kind(outcome.form), outcome.form.dtype), {})
        line.setdefault(size_of(outcome.form), []).append(outcome)
    return [
        Line(kind, dtype, tuple(FormCell(line[size]) if size in line else None for size in SIZES))
        for (kind, dtype), line in found.items()
    ]


def page(table: Conformance) -> str:
    """Makes the page.

    Args:
        table: The outcomes of the forms.

    Returns:
        A complete HTML document.

    Raises:
        MissingDependencyError: A package is missing.
    """
    by_op: dict[str, list[Outcome]] = {}
    for outcome in table.cases:
        by_op.setdefault(outcome.form.op, []).append(outcome)
    return (
        templates()
        .get_template("conformance.html")
        .render(
            table=table,
            sizes=SIZES,
            words=WORDS,
            operators={op: lines_of(outcomes) for op, outcomes in by_op.items()},
            counts={
                op: {verdict: sum(item.verdict == verdict for item in outcomes) for verdict in WORDS}
                for op, outcomes in by_op.items()
            },
            totals={verdict: sum(item.verdict == verdict for item in table.cases) for verdict in WORDS},
        )
    )
