"""Output that commands share: how much to say, and reports and tables on stdout."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click

from onnx_attnfuse.kernels.policy import SELECTION, switch
from onnx_attnfuse.options import Progress
from onnx_attnfuse_cli.terminal import echo

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report
    from onnx_attnfuse_cli.files import Files


_WIDE = 200


def start_logging(*, verbose: int) -> None:
    """Send the library's log to stderr, if it is wanted: all of it, or what was chosen for each site.

    Raises:
        OptionError: ATTNFUSE_DEBUG is none of 0, 1 and 2.
    """
    debug = switch("ATTNFUSE_DEBUG", os.environ, most=2)
    if verbose or debug:
        level = logging.INFO if verbose else logging.WARNING
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if debug:
        logging.getLogger(SELECTION).setLevel(logging.INFO if debug == 1 else logging.DEBUG)


def show(report: Report, *, verb: Literal["fused", "would fuse"], verbose: int, err: bool = False) -> None:
    """Print a report; lines are cut nowhere, and wrapped only where a terminal asks for it."""
    from rich.console import Console

    from onnx_attnfuse.report.text import ReportText

    console = Console(highlight=False, stderr=err)
    console.print(ReportText(report, verb=verb, fold=not verbose, counts=verbose > 1), soft_wrap=not console.is_terminal)


def print_table(table: Any) -> None:
    """Print a table; where there is no terminal to say how wide, it is wide."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    console.print(table)


def show_verdict(files: Files, report: Report, *, verbose: int) -> None:
    """Print what became of one model of several: a line, or the whole report under its name."""
    from onnx_attnfuse.report.grouping import last_line

    where = f", {files.written}" if files.out else ""
    if verbose:
        echo(f"{files.model}:")
        show(report, verb="fused", verbose=verbose)
        echo(files.written, *files.notes, err=True)
    else:
        echo(f"{files.model}: {last_line(report, 'fused')}{where}", *files.notes)


def show_summary(reports: Iterable[Report | None]) -> None:
    """Print the results of several models together; None is one that could not be done."""
    from onnx_attnfuse.verify.verifier import NOT_VERIFIED

    found = list(reports)
    done = [report for report in found if report is not None]
    fused, candidates = sum(report.fused for report in done), sum(report.candidates for report in done)
    if any(NOT_VERIFIED in report.notes for report in done):
        echo(NOT_VERIFIED)
    echo(f"{len(done)} of {len(found)} models done: fused {fused} of {candidates} attention sites")


def _nothing(step: str, done: int, total: int) -> None:
    del step, done, total


@contextlib.contextmanager
def progress_bar(*, shown: bool) -> Generator[Progress]:
    """A callback for `Options.progress` that draws the current step and the time since the beginning; it vanishes at the end.

    Args:
        shown: Whether to draw at all; nothing is drawn either where stderr is not a terminal.

    Yields:
        The callback.
    """
    if not shown or not sys.stderr.isatty():  # rich takes FORCE_COLOR for a terminal, and logs would hold every frame
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[parts]}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None, parts="")

        def advance(step: str, done: int, total: int) -> None:
            parts = f"{done}/{total}" if total > 1 else ""
            bar.update(task, description=step, completed=done, parts=parts)
            bar.tasks[0].total = total if total > 1 else None  # update() takes None for no change

        yield advance


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
