"""How a run that raised ends: one line on stderr, and the exit status for it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from onnx_attnfuse_cli.exits import Exit
from onnx_attnfuse_cli.suggestions import told


def refused(message: str, model: str = "") -> Exit:
    """Say that something cannot be used."""
    click.echo(f"Error: {_about(model)}{message}", err=True)
    return Exit.BAD_INPUT


def ended_by(error: Exception, args: Sequence[str], model: str = "") -> Exit:
    """Say what ended a run; a defect leaves a file.

    Args:
        error: What was raised.
        args: The command's arguments.
        model: The model it was about, where there are several.
    """
    from onnx_attnfuse.errors import InputError, MissingDependencyError, RunError, VerificationError

    if isinstance(error, VerificationError):
        click.echo(f"Error: {_about(model)}{error}", err=True)
        return Exit.DIFFERS
    if isinstance(error, (InputError, MissingDependencyError, RunError)):
        return refused(str(error), model)
    if isinstance(error, click.ClickException):
        return refused(told(error), model)
    from onnx_attnfuse_cli.defect import write_report

    path = write_report(error, args)
    what = f"{type(error).__name__} inside attnfuse, a defect of ours; {path} says where, please report it"
    click.echo(f"Error: {_about(model)}{what}", err=True)
    return Exit.DEFECT


def _about(model: str) -> str:
    return f"{model}: " if model else ""
