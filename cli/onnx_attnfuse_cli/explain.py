"""`attnfuse explain`: what would be fused, and why the rest would not."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click

from onnx_attnfuse_cli.exits import Exit
from onnx_attnfuse_cli.files import Files
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.progress import progress_bar
from onnx_attnfuse_cli.show import show, start_logging, verbose_option


@click.command("explain", short_help="Say what would be fused, and why the rest would not.")
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (docs/report.md).")
@derived_options(only=("ep", "arch", "padding", "dim", "target", "always", "keep_outputs"))
@click.option(
    "--report",
    "written",
    type=click.Path(path_type=pathlib.Path),
    help="Write the report there too: a page with pictures if it ends in .html, else JSON.",
)
@verbose_option
def command(*, model: pathlib.Path, as_json: bool, written: pathlib.Path | None, verbose: bool, **chosen: Any) -> int:
    """Say what each attention of MODEL is and whether it would be fused; the model is not written."""
    files = Files(model, None, (written,) if written else ())
    files.check()
    start_logging(verbose=verbose)
    import onnx_attnfuse

    with progress_bar(shown=True) as progress:
        options = onnx_attnfuse.Options(**chosen, pictures=files.has_page, progress=progress)
        report = onnx_attnfuse.explain(model, options=options)
    if written:
        onnx_attnfuse.write_report(report, written, model.name, verb="would fuse")
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, verb="would fuse", verbose=verbose)
    return Exit.DONE
