"""`--format`: the report as text, and as what GitHub and other services show."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import click

from onnx_attnfuse_cli.terminal import echo

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report

Format = Literal["text", "github", "sarif"]
_SUMMARY = "GITHUB_STEP_SUMMARY"


def show_findings(reports: Mapping[pathlib.Path, Report | None], form: Format, *, is_required: bool) -> None:
    """Print the findings of a run in a format; text has been printed before.

    Args:
        reports: The report of each model; None for a model that could not be optimized.
        form: The format.
        is_required: Whether an unfused attention is an error.
    """
    if form == "text":
        return
    from onnx_attnfuse.report import annotations

    found = annotations.findings(reports, is_required=is_required)
    if form == "sarif":
        click.echo(json.dumps(annotations.sarif(found), indent=2))
        return
    echo(*annotations.github(found))
    if path := os.environ.get(_SUMMARY):
        with pathlib.Path(path).open("a", encoding="utf-8") as file:
            file.write(annotations.summary(reports, found))
