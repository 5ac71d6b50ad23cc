"""`attnfuse explain`: what would be fused, and why the rest would not."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click

from onnx_attnfuse_cli.exits import Exit
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.policy import policy_options
from onnx_attnfuse_cli.progress import progress_bar
from onnx_attnfuse_cli.show import show, start_logging, verbose_option

_FIELDS = "ep arch padding dim target always keep_outputs patterns skip_patterns only_patterns".split()


@click.command("explain", short_help="Say what would be fused, and why the rest would not.")
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (docs/report.md).")
@derived_options(only=_FIELDS)
@policy_options
@verbose_option
def command(*, model: pathlib.Path, as_json: bool, verbose: int, **chosen: Any) -> int:
    """Say what each attention of MODEL is and whether it would be fused; write nothing."""
    import onnx_attnfuse

    start_logging(verbose=verbose)
    with progress_bar(shown=True) as progress:
        report = onnx_attnfuse.explain(model, options=onnx_attnfuse.Options(**chosen, progress=progress))
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, verb="would fuse", verbose=verbose)
    return Exit.DONE
