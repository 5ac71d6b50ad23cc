"""Reports as files: pages for readers, JSON for programs."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Literal

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.report.model import Report

_PAGES = {".html", ".htm"}


def is_page(path: str | os.PathLike[str]) -> bool:
    """Whether a report of this name is written as a page; any other is JSON."""
    return pathlib.Path(path).suffix.lower() in _PAGES


def write_report(
    report: Report, path: str | os.PathLike[str], title: str | None = None, verb: Literal["fused", "would fuse"] = "fused"
) -> None:
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
    if is_page(path):
        from onnx_attnfuse.report.html import page

        text = page(report, title or path.stem, verb)
    else:
        text = json.dumps(report.to_dict(), indent=2) + "\n"
    write_text(text, path)


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
