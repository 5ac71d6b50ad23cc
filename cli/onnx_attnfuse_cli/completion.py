"""`attnfuse completion`: the script by which a shell completes commands, options and choices."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.suggestions import Choice
from onnx_attnfuse_cli.terminal import Exit

_VARIABLE = "_ATTNFUSE_COMPLETE"


@click.command(
    "completion",
    cls=Manual,
    short_help="Print the script for completion in a shell.",
    examples=[
        Example('eval "$(attnfuse completion bash)"', "For bash, in ~/.bashrc."),
        Example('eval "$(attnfuse completion zsh)"', "For zsh, in ~/.zshrc, after compinit."),
        Example("attnfuse completion fish > ~/.config/fish/completions/attnfuse.fish", "For fish, once."),
    ],
)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, *, shell: str) -> int:
    """Print the script by which SHELL completes commands, options, choices and file names of attnfuse."""
    root = context.find_root()
    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(root.command, {}, "attnfuse", _VARIABLE).source())
    return Exit.DONE
