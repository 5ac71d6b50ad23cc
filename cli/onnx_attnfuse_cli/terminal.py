"""Lines for a terminal, whatever names in them hold."""

from __future__ import annotations

import click


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines, each of which stays one.

    Args:
        *lines: The lines.
        err: Whether to print to stderr.
    """
    from onnx_attnfuse.report.lines import one_line

    for line in lines:
        click.echo(one_line(line), err=err)
