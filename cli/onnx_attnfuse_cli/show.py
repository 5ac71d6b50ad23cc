"""What both commands share: how much to say, and the report on stdout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report

_Function = TypeVar("_Function", bound=Callable[..., Any])


def verbose_option(command: _Function) -> _Function:
    """The option `-v`."""
    text = "One line per site, even where sites are alike; log to stderr. -vv: also what each pattern did."
    return click.option("-v", "--verbose", count=True, help=text)(command)


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
