"""Defaults of options from the table `[tool.attnfuse]` of pyproject.toml."""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import click

from onnx_attnfuse_cli.suggestions import suggestion
from onnx_attnfuse_cli.terminal import echo

_FILE = "pyproject.toml"
_TABLE = "attnfuse"
_COMMANDS = ("optimize", "explain")
"""The commands that take the defaults, each those that it has; the first has all."""


def defaults(args: Sequence[str], folder: pathlib.Path) -> Mapping[str, Mapping[str, Any]]:
    """The defaults of each command, as click takes them.

    Args:
        args: The arguments of the run.
        folder: The working directory; the first pyproject.toml from there upwards counts.

    Raises:
        click.UsageError: The table cannot be read, or has a key or a value that is none.
    """
    if not args or args[0] not in _COMMANDS:
        return {}
    path = next((place / _FILE for place in (folder, *folder.parents) if (place / _FILE).is_file()), None)
    if path is None:
        return {}
    table = _table(path)
    if not table:
        return {}
    command = _command(args[0])
    known = {parameter.name: parameter for parameter in _command(_COMMANDS[0]).params if isinstance(parameter, click.Option)}
    own = {parameter.name for parameter in command.params}
    given: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            meant = suggestion(key, [other.replace("_", "-") for other in known if other])
            raise click.UsageError(f"{path}: [tool.attnfuse] has no key '{key}'; {meant or 'docs/options.md lists them'}")
        words = _as_typed(value)
        _check(command, known[name], words, f"{path}: {key}")
        if name in own:
            given[name] = words
    if not {"-q", "--quiet"} & {*args} and not table.get("quiet"):
        echo(f"attnfuse: {path.name} sets {', '.join(key for key in table if key.replace('-', '_') in given)}", err=True)
    return {args[0]: given}


def _command(name: str) -> click.Command:
    return cast("click.Command", importlib.import_module(f"onnx_attnfuse_cli.{name}").command)


def _table(path: pathlib.Path) -> Mapping[str, Any]:
    """The table of a file; a file that does not name it is not parsed."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "attnfuse" not in text:
        return {}
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        content = toml.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{path} is not TOML: {error}; correct the file") from error
    table: Any = content.get("tool", {}).get(_TABLE, {})
    if not isinstance(table, Mapping):
        raise click.UsageError(f"{path}: tool.attnfuse is no table; write [tool.attnfuse]")
    return cast("Mapping[str, Any]", table)


def _as_typed(value: Any) -> Any:
    """A value as it would be typed: `{seq = 128}` is `seq=128`."""
    return [f"{name}={length}" for name, length in cast("Mapping[str, Any]", value).items()] if isinstance(value, dict) else value


def _check(command: click.Command, option: click.Option, value: Any, where: str) -> None:
    """Refuses a value that the option does not take.

    Raises:
        click.UsageError: It does not.
    """
    if option.multiple != isinstance(value, list) or (option.is_flag and not isinstance(value, bool)):
        wanted = "a list" if option.multiple else "true or false" if option.is_flag else "one value"
        raise click.UsageError(f"{where} is {value!r}; give {wanted}")
    context = click.Context(command)
    try:
        words = option.type_cast_value(context, value)
        if option.callback:
            option.callback(context, option, words)
    except click.BadParameter as error:
        raise click.UsageError(f"{where} is {value!r}; {error.message.rstrip('.')}") from error
