"""Suggestions of what may have been meant by a command, an option or a choice that does not exist.

The wording is the same whatever the version of click: `No such command 'optimise'; did you mean 'optimize'?`
"""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.terminal import Exit


class Group(click.Group):
    """A group that suggests a command for one that does not exist, and says what there is where none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments after the options of the group itself; without any the help is shown, and that is an error."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(Exit.BAD_INPUT)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments begin with, its name, and the rest of them.

        Raises:
            click.UsageError: There is no such command.
        """
        name = args[0]
        normalized = ctx.token_normalize_func(name) if ctx.token_normalize_func is not None else name
        known = any(self.get_command(ctx, form) is not None for form in (name, normalized))
        if known or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        commands = self.list_commands(ctx)
        if pathlib.PurePath(name).suffix == ".onnx" and "optimize" in commands:
            raise click.UsageError(f"No such command '{name}'; did you mean '{ctx.command_path} optimize {name}'?", ctx)
        listed = f"{ctx.command_path} --help lists them"
        raise click.UsageError(f"No such command '{name}'; {suggestion(normalized, commands) or listed}", ctx)


if TYPE_CHECKING:
    _Words = click.Choice[str]
else:
    _Words = click.Choice  # generic from click 8.2 on


class Choice(_Words):
    """A choice between several words; for another word the nearest is suggested."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word, if it is one of them.

        Raises:
            click.BadParameter: It is none of them.
        """
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            meant = suggestion(str(value), self.choices)
            if not meant:
                raise
            raise click.BadParameter(f"{error.message.rstrip('.')}; {meant}", ctx, param) from error


class Choices(Choice):
    """A choice of one or several words, with commas between."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The words, if each is one that there is."""
        return ",".join(super(Choices, self).convert(word.strip(), param, ctx) for word in str(value).split(","))


def reported(error: click.ClickException) -> str:
    """The line that tells of an error in the arguments."""
    if isinstance(error, click.MissingParameter) and error.ctx is not None:
        return f"{error.format_message().rstrip('.')}; {error.ctx.command_path} --help says what goes where"
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    near = list(error.possibilities or ())
    meant = suggestion(error.option_name, near)
    listed = f"{error.ctx.command_path} --help lists them" if error.ctx is not None else "--help lists them"
    return f"No such option '{error.option_name}'; {meant or listed}"


def suggestion(given: str, known: Iterable[str]) -> str:
    """`did you mean 'optimize'?`; empty where nothing known is like what was given."""
    lowered = {item.lower(): item for item in known}
    found = difflib.get_close_matches(given.lower(), lowered, 1)
    return f"did you mean '{lowered[found[0]]}'?" if found else ""
