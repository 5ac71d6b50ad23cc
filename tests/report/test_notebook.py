"""A report as the table of a notebook, parsed by the rules of HTML."""

from __future__ import annotations

from justhtml import JustHTML

import onnx_attnfuse
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import Report, SiteReport
from tests.support.small_models import ATTENTION, parsed


def test_a_result_is_a_row_for_each_kind_of_attention() -> None:
    result = onnx_attnfuse.optimize(parsed(ATTENTION))
    found = JustHTML(result._repr_html_(), sanitize=False)
    rows = [[cell.to_text() for cell in row.query("td")] for row in found.query("tbody tr")]
    assert [(row[0], row[1], row[3]) for row in rows] == [(site.name, "fused", site.op) for site in result.report.sites]
    assert result.report._repr_html_() == result._repr_html_()


def test_names_are_text_and_reasons_say_what_to_do() -> None:
    name = "<script>alert(1)</script>"
    site = SiteReport(name, "main", "skipped", reasons=(Reason("soft-fill", "masked with <5"),))
    found = JustHTML(Report((site,), 0.0, notes=("<b>",))._repr_html_(), sanitize=False)
    assert not found.query("script, b")
    (row,) = found.query("tbody tr")
    assert row.query("td")[0].to_text() == name
    assert "to do: Mask with -inf" in row.to_text()
