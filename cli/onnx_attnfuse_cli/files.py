"""The file a command writes: refused early where it would be regretted after the work is done."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


def output_option(suffix: str) -> Callable[[_Function], _Function]:
    """The option `-o`, whose help names where the result goes without it: the model's name with `suffix`."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=pathlib.Path),
        help=f"Where to write.  [default: MODEL's name with {suffix}]",
    )


def output_for(model: pathlib.Path, output: pathlib.Path | None, suffix: str) -> pathlib.Path:
    """Where the result goes: `output`, or beside the model.

    Raises:
        UsageError: It is the model itself, a folder, or in a folder that does not exist.
    """
    path = output or model.with_name(model.stem + suffix)
    if path.resolve() == model.resolve() or (path.exists() and model.exists() and path.samefile(model)):
        raise click.UsageError(f"-o is the model itself, {model}; choose another file")
    if path.is_dir():
        raise click.UsageError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise click.UsageError(f"the folder {path.parent} does not exist; make it first")
    return path
