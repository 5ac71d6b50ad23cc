"""A model from standard input, and a result to standard output."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Generator

import click

STREAM = pathlib.Path("-")


@contextlib.contextmanager
def piped(model: pathlib.Path, output: pathlib.Path | None) -> Generator[tuple[pathlib.Path, pathlib.Path | None]]:
    """Files in the place of streams; a result for standard output is written there at the end.

    Args:
        model: The model to read, `-` for standard input.
        output: The file to write, `-` for standard output; None where nothing is written.

    Yields:
        The model and the output as files.

    Raises:
        click.UsageError: Standard output is a terminal, or the result has data files.
    """
    if output == STREAM and sys.stdout.isatty():
        raise click.UsageError("-o - would write a model to the terminal; redirect it to a file or a program")
    with tempfile.TemporaryDirectory() as folder:
        read, written = model, output
        if model == STREAM:
            read = pathlib.Path(folder, "stdin.onnx")
            with read.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        if output == STREAM:
            written = pathlib.Path(folder, "out", "stdout.onnx")
            written.parent.mkdir()
        yield read, written
        if written is None or output != STREAM or not written.exists():
            return
        if len(list(written.parent.iterdir())) > 1:
            raise click.UsageError("the result has data files, which one stream cannot hold; give a file with -o")
        with written.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()
