"""Which kernels a command plans for: its options, then the environment; one line says what was seen there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse.kernels.policy import Policy, read_environment
from onnx_attnfuse_cli.options import field_docs
from onnx_attnfuse_cli.terminal import echo

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import Report


def policy_options(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command an option for each field of `Policy`; the command receives them as `policy`."""
    fields = dataclasses.fields(Policy)

    @functools.wraps(command)
    def with_policy(**chosen: Any) -> int:
        given = {field.name: chosen.pop(field.name) for field in fields}
        environment = read_environment()
        said = {name: value for name, value in given.items() if value is not None}
        policy = dataclasses.replace(environment.policy, **said)
        if environment.seen and not chosen.get("quiet"):
            echo(f"attnfuse: {environment.line(policy)}", err=True)
        return command(policy=policy, **chosen)

    decorated: Callable[..., int] = with_policy
    for field in reversed(fields):
        name = field.name.replace("_", "-")
        help_text = field_docs(Policy).get(field.name, "")
        decorated = click.option(f"--{name}/--no-{name}", field.name, default=None, help=help_text)(decorated)
    return decorated


def warn_of_variables(report: Report) -> None:
    """Print a line, also with -q, where variables alone ask for kernels and attentions are left unfused."""
    environment = read_environment()
    kept = [name for name in environment.seen if name not in environment.idle]
    if environment.policy.wishes and environment.policy == report.policy and report.skipped:
        names = ", ".join(kept)
        left = f"{report.skipped} of {report.candidates} attentions are left unfused"
        echo(
            f"Warning: {names} asks for {environment.policy} kernels only, and {left}; unset it to fuse with any kernel", err=True
        )
