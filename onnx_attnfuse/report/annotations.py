"""Findings for machines that show them beside the code: GitHub's annotations and job summary, and SARIF.

A finding is one kind of attention that stays unfused, or a model that could not be read. `github` and `sarif` write findings,
`summary` is a table in Markdown.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.grouping import folded, last_line
from onnx_attnfuse.report.model import Report

Level = Literal["error", "warning"]
_FAILED = "failed"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HOME = "https://github.com/onnx-attnfuse/onnx-attnfuse"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One kind of attention that stays unfused."""

    model: pathlib.Path
    level: Level
    code: str
    """The first reason's code, or `failed` for a model without a report."""
    place: str
    """The module or the node, with the number of such attentions."""
    text: str


def findings(reports: Mapping[pathlib.Path, Report | None], *, is_required: bool) -> list[Finding]:
    """The findings of a run.

    Args:
        reports: The report of each model; None for a model that could not be optimized.
        is_required: Whether an unfused attention is an error, as with `--require-all`.
    """
    return [finding for model, report in reports.items() for finding in _of_model(model, report, is_required=is_required)]


def _of_model(model: pathlib.Path, report: Report | None, *, is_required: bool) -> Iterator[Finding]:
    if report is None:
        yield Finding(model, "error", _FAILED, model.name, "the model could not be optimized; the log has the reason")
        return
    for row in folded(report):
        if row.site.status == "skipped" and row.site.reasons:
            code = row.site.reasons[0].code
            level: Level = "error" if is_required or code == "differs" else "warning"
            yield Finding(model, level, code, row.name, "; ".join(["left unfused", *row.reasons, *row.remedy]))


def github(found: Iterable[Finding]) -> Iterator[str]:
    """Findings as workflow commands, which GitHub shows beside the files of a pull request."""
    for item in found:
        properties = {"file": _relative(item.model), "title": f"attnfuse: {item.code}"}
        said = ",".join(f"{name}={_escaped(value, property=True)}" for name, value in properties.items())
        yield f"::{item.level} {said}::{_escaped(f'{item.place}: {item.text}')}"


def summary(reports: Mapping[pathlib.Path, Report | None], found: Iterable[Finding]) -> str:
    """A run as Markdown: the result of each model, and a line for each finding."""
    lines = ["### attnfuse", "", "| model | attentions |", "|---|---|"]
    for model, report in reports.items():
        lines.append(
            f"| {_cell(_relative(model))} | {_cell(last_line(report, 'fused')) if report else 'could not be optimized'} |"
        )
    items = [f"- `{item.code}` {_cell(_relative(item.model))}, {_cell(item.place)}: {_cell(item.text)}" for item in found]
    return "\n".join([*lines, "", *items, ""])


def sarif(found: Iterable[Finding]) -> Mapping[str, Any]:
    """Findings as a SARIF log of version 2.1.0; a reason code is a rule."""
    items = list(found)
    driver = {
        "name": "attnfuse",
        "version": importlib.metadata.version("onnx-attnfuse"),
        "informationUri": _HOME,
        "rules": [_rule(code) for code in dict.fromkeys(item.code for item in items)],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": [*map(_result, items)]}]}


def _rule(code: str) -> Mapping[str, Any]:
    family = reason_codes.by_code().get(code)
    if family is None:
        return {"id": code, "helpUri": _HOME}
    entry = family.codes[code]
    return {"id": code, "shortDescription": {"text": entry.meaning}, "help": {"text": entry.remedy}, "helpUri": family.url}


def _result(item: Finding) -> Mapping[str, Any]:
    place = {"artifactLocation": {"uri": urllib.parse.quote(_relative(item.model))}, "region": {"startLine": 1}}
    location = {"physicalLocation": place, "logicalLocations": [{"fullyQualifiedName": item.place}]}
    text = f"{item.place}: {item.text}"
    return {"ruleId": item.code, "level": item.level, "message": {"text": text}, "locations": [location]}


def _relative(path: pathlib.Path) -> str:
    """The path below the working directory, which is the repository in a workflow."""
    whole = pathlib.Path(os.path.normpath(path.absolute()))
    return (whole.relative_to(pathlib.Path.cwd()) if whole.is_relative_to(pathlib.Path.cwd()) else whole).as_posix()


def _escaped(text: str, *, property: bool = False) -> str:  # noqa: A002 - GitHub's word
    plain = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return plain.replace(":", "%3A").replace(",", "%2C") if property else plain


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
