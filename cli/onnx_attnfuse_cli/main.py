"""Entry point: commands by name, and every way a run can end.

Commands are imported when they are asked for, so that `attnfuse --version` starts at once.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence

import click

from onnx_attnfuse_cli.exits import Exit

_COMMANDS = {
    "optimize": "onnx_attnfuse_cli.optimize",
    "explain": "onnx_attnfuse_cli.explain",
    "convert": "onnx_attnfuse_cli.convert",
    "unfuse": "onnx_attnfuse_cli.unfuse",
    "verify": "onnx_attnfuse_cli.verify",
}


class _Commands(click.Group):
    """A group whose commands are modules, each with a `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        return importlib.import_module(_COMMANDS[cmd_name]).command


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from onnx_attnfuse_cli.versions import version_of

    click.echo(f"attnfuse {version_of('onnx-attnfuse')}")
    ctx.exit()


def _hyphens(token: str) -> str:
    return token.replace("_", "-")


@click.command(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _hyphens,
        "max_content_width": 110,
    },
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version.")
def _attnfuse() -> None:
    """Find attention in ONNX models, fuse it exactly, and say why for every site."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        The exit status, see `onnx_attnfuse_cli.exits`.
    """
    if args is None:
        gc.disable()  # a graph is one cycle that lives as long as the process; looking for others takes a sixth of the time
        args = sys.argv[1:]
    try:
        return _attnfuse.main(list(args), prog_name="attnfuse", standalone_mode=False) or Exit.DONE
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return Exit.BAD_INPUT
    except click.ClickException as error:
        return _refused(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:  # noqa: BLE001 - the last place that can still tell the user something useful
        return _ended_by(error, args)


def _refused(message: str) -> Exit:
    click.echo(f"Error: {message}", err=True)
    return Exit.BAD_INPUT


def _ended_by(error: Exception, args: Sequence[str]) -> Exit:
    from onnx_attnfuse.errors import InputError, MissingDependencyError, VerificationError

    if isinstance(error, VerificationError):
        click.echo(f"Error: {error}", err=True)
        return Exit.DIFFERS
    if isinstance(error, (InputError, MissingDependencyError)):
        return _refused(str(error))
    from onnx_attnfuse_cli.defect import write_report

    path = write_report(error, args)
    click.echo(f"Error: {type(error).__name__} inside attnfuse, a defect of ours; {path} says where, please report it", err=True)
    return Exit.DEFECT
