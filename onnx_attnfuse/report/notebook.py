"""The report as a table of a notebook: a row for each kind of attention."""

from __future__ import annotations

import html

from onnx_attnfuse.report.grouping import folded, last_line, meaning
from onnx_attnfuse.report.model import Report


def table(report: Report) -> str:
    """The table as HTML, without scripts, styles or anything from elsewhere."""
    titles = ("site", "status", "attention", "operator", "why")
    rows = [
        (row.name, row.site.status, meaning(row.site), row.site.op or "", "; ".join((*row.reasons, *row.remedy)))
        for row in folded(report)
    ]
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    listed = f"<ul>{notes}</ul>" if notes else ""
    last = f"<p>{html.escape(last_line(report, 'fused'))}</p>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{listed}{last}"
