"""Entry point: commands by name, and every way a run can end.

Commands are imported when they are asked for, so that `attnfuse --version` starts at once.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import os
import pathlib
import signal
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

import click

from onnx_attnfuse.kernels.policy import switch
from onnx_attnfuse_cli.config import defaults
from onnx_attnfuse_cli.endings import ended_by, refused
from onnx_attnfuse_cli.manual import Example, write_examples
from onnx_attnfuse_cli.suggestions import Group, reported
from onnx_attnfuse_cli.terminal import Exit

VARIABLE = "ATTNFUSE_DEFER_IMPORTS"
"""An environment variable; 0 imports everything at once."""
_DEFERRED = frozenset(["sympy", "onnx_ir._symbolic_shapes"])
"""SymPy, and the module of onnx-ir that looks into it while it is imported."""


class _Deferring:
    """Finds a deferred module where it is, and runs it when it is first accessed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _DEFERRED else None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def defer_imports() -> None:
    """Defers the modules that can be, in this process from here on; modules imported already stay as they are.

    Raises:
        OptionError: `ATTNFUSE_DEFER_IMPORTS` is neither 0 nor 1.
    """
    if switch(VARIABLE, os.environ) != 0:
        sys.meta_path.insert(0, _Deferring())


_COMMANDS = {
    "optimize": "onnx_attnfuse_cli.optimize",
    "explain": "onnx_attnfuse_cli.explain",
    "view": "onnx_attnfuse_cli.view",
    "patterns": "onnx_attnfuse_cli.patterns",
    "kernels": "onnx_attnfuse_cli.kernels",
    "bench": "onnx_attnfuse_cli.bench",
    "conformance": "onnx_attnfuse_cli.conformance",
    "verify": "onnx_attnfuse_cli.verify",
    "check-certificate": "onnx_attnfuse_cli.certificates",
    "convert": "onnx_attnfuse_cli.convert",
    "unfuse": "onnx_attnfuse_cli.unfuse",
    "doctor": "onnx_attnfuse_cli.doctor",
    "completion": "onnx_attnfuse_cli.completion",
}


_EXAMPLES = [
    Example(
        "attnfuse optimize model.onnx",
        "Fuses attention exactly, writes model.attnfuse.onnx, and reports why or why not.",
    ),
    Example("attnfuse explain model.onnx", "Reports what would be done, and writes nothing."),
    Example('eval "$(attnfuse completion bash)"', "Turns on completion with Tab."),
]


class _Commands(Group):
    """A group whose commands are modules, each with a `command`."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes what follows the commands."""
        write_examples(_EXAMPLES, formatter)
        super().format_epilog(ctx, formatter)

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
    from onnx_attnfuse_cli.versions import versions

    for package, version in versions():
        click.echo(f"{package} {version}")
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
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions of attnfuse and its packages.",
)
def _attnfuse() -> None:
    """Find attention in ONNX models, fuse it exactly, and report why or why not."""


def _escape_bytes_of_paths() -> None:
    """Lets names of files that are not UTF-8 be printed, with their bytes escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Terminated(BaseException):
    """SIGTERM, raised where the run is, so that what it has begun is undone; nothing that contains failures catches it."""


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run is ending already, and undoes what it has begun
    raise _Terminated


def _run(args: Sequence[str]) -> int:
    found = defaults(args, pathlib.Path.cwd())
    done = _attnfuse.main(list(args), prog_name="attnfuse", standalone_mode=False, obj=tuple(args), default_map=found)
    return done or Exit.DONE


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        The exit status, see `onnx_attnfuse_cli.terminal`.
    """
    is_process = args is None
    if args is None:
        gc.disable()  # a graph is one cycle that lives as long as the process; looking for others takes a sixth of the time
        args = sys.argv[1:]
    try:
        if is_process:
            signal.signal(signal.SIGTERM, _terminate)
            _escape_bytes_of_paths()
            defer_imports()
        return _run(args)
    except click.ClickException as error:
        return refused(reported(error))
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return Exit.INTERRUPTED
    except _Terminated:
        click.echo("Terminated.", err=True)
        return Exit.TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:  # noqa: BLE001 - the last place that can still tell the user something useful
        return ended_by(error, args)
    finally:
        if is_process:
            gc.freeze()  # Python looks for cycles once more on its way out; the rest goes with the process
