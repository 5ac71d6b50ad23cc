"""The page of a table of conformance: every form is in one place, and the worst verdict colours it."""

from __future__ import annotations

import dataclasses

import justhtml
import pytest

from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome, Verdict, known
from onnx_attnfuse.report.html import SIZES, conformance_page, lines_of, size_of

FORM = Form("MultiHeadAttention", "float32", "bias", "full")


def of(*verdicts: Verdict) -> Conformance:
    outcomes = [Outcome(dataclasses.replace(FORM, batch=place + 1), verdict) for place, verdict in enumerate(verdicts)]
    return Conformance("made-up", {"onnxruntime": "0"}, tuple(outcomes))


def test_every_form_of_a_real_table_is_in_one_cell() -> None:
    table = known("cpu")
    assert table is not None
    for op in {case.form.op for case in table.cases}:
        cases = [case for case in table.cases if case.form.op == op]
        shown = [outcome for line in lines_of(cases) for cell in line.cells if cell for outcome in cell.outcomes]
        assert sorted(case.form.name for case in shown) == sorted(case.form.name for case in cases)


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({}, "few rows"),
        ({"rows": 264, "columns": 264}, "many rows"),
        ({"cached": True, "rows": 1}, "one row on a cache"),
        ({"cached": True, "rows": 4}, "rows on a cache"),
        ({"heads": 9}, "odd number of heads"),
        ({"head_size": 15}, "other head sizes"),
    ],
)
def test_sizes_have_classes(change: dict[str, int], size: str) -> None:
    assert size_of(dataclasses.replace(FORM, **change)) == size
    assert size in SIZES


@pytest.mark.parametrize(
    ("verdicts", "colour", "words"),
    [
        (("right", "right"), "right", "right 2"),
        (("right", "wrong", "unsupported"), "wrong", "wrong 1 of 3"),
        (("on-cpu", "unsupported"), "unsupported", "refused 1 of 2"),
        (("right", "on-cpu"), "on-cpu", "on the CPU 1 of 2"),
    ],
)
def test_the_worst_verdict_colours_a_cell(verdicts: tuple[Verdict, ...], colour: str, words: str) -> None:
    document = justhtml.JustHTML(conformance_page(of(*verdicts)))
    (cell,) = document.query(f"td.{colour}")
    assert cell.to_text().strip() == words


def test_reasons_are_told_and_nothing_of_them_is_markup() -> None:
    table = Conformance("made-up", {}, (Outcome(FORM, "wrong", detail="<b>a & b</b>"),))
    document = justhtml.JustHTML(conformance_page(table))
    (told,) = document.query("td.wrong li")
    assert FORM.name in told.to_text()
    assert "<b>a & b</b>" in told.to_text()
    assert not document.query("td b")
