"""A file for a user to attach to a bug report when attnfuse itself fails."""

from __future__ import annotations

import datetime as dt
import pathlib
import platform
import shlex
import tempfile
import traceback
from collections.abc import Sequence

from onnx_attnfuse_cli.versions import version_of

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
    return write_traces(["".join(traceback.format_exception(error))], args)


def write_traces(traces: Sequence[str], args: Sequence[str]) -> pathlib.Path:
    """Write the same of several errors.

    Args:
        traces: Their tracebacks.
        args: The command's arguments.

    Returns:
        The file.
    """
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
