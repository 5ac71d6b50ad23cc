"""How a run that raised ends: one line on stderr, and the exit status for it.

Where attnfuse itself fails, there is a file as well, for a user to attach to a bug report.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from onnx_attnfuse_cli.suggestions import reported
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.containment import Failure

_PACKAGES = (
    "onnx-attnfuse",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "numpy",
    "click",
    "rich",
    "torch",
)


def write_report(error: Exception, args: Sequence[str]) -> pathlib.Path:
    """Write traceback, versions and command line to `attnfuse-error-<time>.txt`.

    Args:
        error: The exception that ended the run.
        args: The command's arguments.

    Returns:
        The file: in the working directory, or in the temporary one where that cannot be written.
    """
    import traceback

    return write_traces(["".join(traceback.format_exception(error))], args)


def write_traces(traces: Sequence[str], args: Sequence[str]) -> pathlib.Path:
    """Write the same of several errors.

    Args:
        traces: Their tracebacks.
        args: The command's arguments.

    Returns:
        The file.
    """
    import datetime as dt
    import platform
    import shlex
    import tempfile

    from onnx_attnfuse_cli.versions import version_of

    text = "\n".join(
        [
            f"command: attnfuse {shlex.join(args)}",
            f"python: {platform.python_version()} on {platform.platform()}",
            *(f"{package}: {version_of(package)}" for package in _PACKAGES),
            "",
            *traces,
        ]
    )
    name = f"attnfuse-error-{dt.datetime.now():%Y%m%d-%H%M%S}.txt"
    try:
        return _write(pathlib.Path(name), text)
    except OSError:
        return _write(pathlib.Path(tempfile.gettempdir(), name), text)


def _write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def refused(message: str, model: str = "") -> Exit:
    """Say that something cannot be used."""
    echo(f"Error: {_about(model)}{message}", err=True)
    return Exit.BAD_INPUT


def ended_by(error: Exception, args: Sequence[str], model: str = "") -> Exit:
    """Say what ended a run; a defect leaves a file.

    Args:
        error: The exception.
        args: The command's arguments.
        model: The model it was about, where there are several.
    """
    from onnx_attnfuse.errors import InputError, MissingDependencyError, RunError, VerificationError

    if isinstance(error, VerificationError):
        echo(f"Error: {_about(model)}{error}", err=True)
        return Exit.DIFFERS
    if isinstance(error, (InputError, MissingDependencyError, RunError)):
        return refused(str(error), model)
    if isinstance(error, click.ClickException):
        return refused(reported(error), model)
    if isinstance(error, OSError) and _is_of_user(error):
        problem = f"{error.filename} cannot be used: {error.strerror}; check the path, and who may read and write there"
        return refused(problem, model)
    path = write_report(error, args)
    problem = f"{type(error).__name__} inside attnfuse, a defect; {path} has the details, please report it"
    echo(f"Error: {_about(model)}{problem}", err=True)
    return Exit.DEFECT


def _is_of_user(error: OSError) -> bool:
    """Whether an error of the file system is about a file that the user named, and not one of this package."""
    if error.filename is None:
        return False
    import onnx_attnfuse

    path = pathlib.Path(str(error.filename)).absolute()
    return not any(path.is_relative_to(folder) for folder in (sys.prefix, pathlib.Path(onnx_attnfuse.__file__).parent))


def failed(failures: Iterable[Failure], args: Sequence[str], model: str = "") -> Exit:
    """Say what failed on the way without ending the run; defects of ours leave a file.

    Args:
        failures: The failures in the report.
        args: The command's arguments.
        model: The model it was about, where there are several.
    """
    found = list(failures)
    ours = [failure for failure in found if failure.kind == "defect"]
    if ours:
        path = write_traces([failure.trace for failure in ours], args)
        problem = f"{_subjects(ours)} failed, a defect; the rest is done, {path} has the details, please report it"
        echo(f"Error: {_about(model)}{problem}", err=True)
        return Exit.DEFECT
    theirs = [failure for failure in found if failure.kind == "pattern"]
    if theirs:
        echo(f"Error: {_about(model)}{_subjects(theirs)} failed; the rest is done", err=True)
        return Exit.DIFFERS
    return Exit.DONE


def _subjects(failures: Iterable[Failure]) -> str:
    return ", ".join(dict.fromkeys(failure.subject for failure in failures))


def _about(model: str) -> str:
    return f"{model}: " if model else ""
