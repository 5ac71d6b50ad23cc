"""What the commands share: how much to say, and the report on stdout."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report
    from onnx_attnfuse_cli.files import Files


def start_logging(*, verbose: int) -> None:
    """Send the library's log to stderr, if it is wanted."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def show(report: Report, *, verb: Literal["fused", "would fuse"], verbose: int) -> None:
    """Print a report; lines are cut nowhere, and wrapped only where a terminal asks for it."""
    from rich.console import Console

    from onnx_attnfuse.report.text import ReportText

    console = Console(highlight=False)
    console.print(ReportText(report, verb=verb, fold=not verbose, counts=verbose > 1), soft_wrap=not console.is_terminal)


def show_verdict(files: Files, report: Report, *, verbose: int) -> None:
    """Print what became of one model of several: a line, or the whole report under its name."""
    from onnx_attnfuse.report.rows import last_line

    where = f", wrote {files.out}" if files.out else ""
    if verbose:
        click.echo(f"{files.model}:")
        show(report, verb="fused", verbose=verbose)
        click.echo(f"wrote {files.out}" if files.out else "nothing written (--dry-run)", err=True)
    else:
        click.echo(f"{files.model}: {last_line(report, 'fused')}{where}")


def show_summary(reports: Iterable[Report | None]) -> None:
    """Print what became of several models together; None stands for one that could not be done."""
    found = list(reports)
    done = [report for report in found if report is not None]
    fused, candidates = sum(report.fused for report in done), sum(report.candidates for report in done)
    click.echo(f"{len(done)} of {len(found)} models done: fused {fused} of {candidates} attention sites")
