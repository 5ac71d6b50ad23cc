"""Reports as files: pages for readers, with a page that leads to those of several models, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Literal

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.report.grouping import last_line
from onnx_attnfuse.report.html import page, templates
from onnx_attnfuse.report.model import Report

Verb = Literal["fused", "would fuse"]
_PAGES = {".html", ".htm"}


def is_page(path: str | os.PathLike[str]) -> bool:
    """Whether a report of this name is written as a page; any other is JSON."""
    return pathlib.Path(path).suffix.lower() in _PAGES


def write_report(report: Report, path: str | os.PathLike[str], title: str | None = None, verb: Verb = "fused") -> None:
    """Writes a report, as a page if the name ends in `.html`, else as JSON; the file appears whole or not at all.

    A page shows pictures if the run took them (`pictures=True`).

    Args:
        report: The report of a run.
        path: Where to; replaced if it exists.
        title: Name of the model, for a page; by default the file's name.
        verb: The action in a page's headline.

    Raises:
        MissingDependencyError: A page was asked for, and Jinja2 or grandalf is not installed.
        OptionError: The file cannot be written.
    """
    path = pathlib.Path(path).absolute()
    write_text(page(report, title or path.stem, verb) if is_page(path) else json.dumps(report.to_dict(), indent=2) + "\n", path)


def write_text(text: str, path: pathlib.Path) -> None:
    """Writes a file whole or not at all; bytes of a path that are no text become question marks.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        with staged() as stage:
            stage.temporary(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}; choose another file") from error


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
