"""A page that leads to the pages of several models."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Literal

from onnx_attnfuse.report.files import write_text
from onnx_attnfuse.report.grouping import last_line
from onnx_attnfuse.report.html import templates
from onnx_attnfuse.report.model import Report

Verb = Literal["fused", "would fuse"]


@dataclasses.dataclass(frozen=True)
class _Entry:
    title: str
    report: Report | None
    verb: Verb

    @property
    def href(self) -> str:
        return href(self.title)

    @property
    def status(self) -> str:
        """The worst status of the sites."""
        if self.report is None or self.report.differing:
            return "differs"
        return "skipped" if self.report.skipped else "fused"

    @property
    def verdict(self) -> str:
        return "could not be done" if self.report is None else last_line(self.report, self.verb)


def href(title: str) -> str:
    """The page of a model as a URL, byte by byte, as a name of a file need not be UTF-8."""
    return urllib.parse.quote(os.fsencode(pathlib.PurePosixPath(title).with_suffix(".html")))


def index(reports: Mapping[str, Report | None], verb: Verb = "fused") -> str:
    """Makes the page.

    Args:
        reports: By name of the model, a path below the folder of the page; None for one that could not be done.
        verb: What was done, in the lines on models.

    Returns:
        A complete HTML document; the page of a model is expected beside it, under the model's name with `.html`.

    Raises:
        MissingDependencyError: A package is missing.
    """
    done = [report for report in reports.values() if report is not None]
    return (
        templates()
        .get_template("index.html")
        .render(
            entries=[_Entry(title, report, verb) for title, report in reports.items()],
            verb=verb,
            done=len(done),
            fused=sum(report.fused for report in done),
            candidates=sum(report.candidates for report in done),
        )
    )


def write_index(reports: Mapping[str, Report | None], path: pathlib.Path) -> None:
    """Writes the page, see `index`.

    Raises:
        OptionError: It cannot be written.
    """
    write_text(index(reports), path)
