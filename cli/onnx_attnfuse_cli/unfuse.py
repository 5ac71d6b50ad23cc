"""`attnfuse unfuse`: fused attention back to the operators of the standard."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.endings import failed
from onnx_attnfuse_cli.files import output_for, output_option, wrote
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.show import progress_bar, start_logging
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.transforms.decompose.decompose import UnfusedSite, UnfuseReport

_SUFFIX = ".unfused.onnx"


_EXAMPLES = [
    Example("attnfuse unfuse fused.onnx", "Writes fused.unfused.onnx, for runtimes that lack the fused operators."),
    Example("attnfuse unfuse fused.onnx -o plain.onnx --verify model", "The same under another name, the whole model compared."),
]


@click.command("unfuse", cls=Manual, short_help="Decompose fused attention into standard ONNX operators.", examples=_EXAMPLES)
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@output_option(_SUFFIX)
@derived_options(only=("ep", "verify", "evidence"))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (docs/unfuse.md).")
@click.option(
    "-v", "--verbose", count=True, help="Report each operator on its own, even where several are alike, and log to stderr."
)
@click.option("-q", "--quiet", is_flag=True, help="Print only problems.")
@click.pass_context
def command(
    context: click.Context,
    *,
    model: pathlib.Path,
    output: pathlib.Path | None,
    as_json: bool,
    verbose: int,
    quiet: bool,
    **chosen: Any,
) -> int:
    """Decompose every fused attention and rotary embedding of MODEL into standard ONNX operators.

    For runtimes without the fused operators. An operator that cannot be decomposed exactly is kept and reported with the reason.
    """
    if quiet and (verbose or as_json):
        raise click.UsageError("-q contradicts -v and --json; choose one")
    out = output_for(model, output, _SUFFIX)
    start_logging(verbose=verbose)
    import onnx_attnfuse

    with progress_bar(shown=not quiet) as progress:
        result = onnx_attnfuse.unfuse(model, options=onnx_attnfuse.Options(**chosen, progress=progress))
    shared = result.save(out)
    if as_json:
        click.echo(json.dumps(result.report.to_dict(), indent=2))
    elif not quiet:
        for line in _lines(result.report, verbose=verbose):
            echo(line)
    if not quiet:
        echo(wrote(out, shared), err=True)
    if result.report.differing:
        echo(f"Error: {result.report.differing} operators differed in verification and were kept", err=True)
        return max(Exit.DIFFERS, failed(result.report.failures, context.obj))
    return failed(result.report.failures, context.obj)


def _lines(report: UnfuseReport, *, verbose: int) -> Iterator[str]:
    """One line for each operator that stays, for all if `verbose`, then what was done."""
    for site in report.sites:
        if verbose or site.reason is not None:
            yield _line(site)
    done = Counter(f"{site.domain or 'ai.onnx'}.{site.op}" for site in report.sites if site.status == "unfused")
    words = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    total = len(report.sites)
    if not total:
        yield "found no fused operator"
        return
    yield f"decomposed {report.unfused} of {total} fused operator{'s' * (total != 1)}{f': {words}' if words else ''}"


def _line(site: UnfusedSite) -> str:
    if site.reason is not None:
        return f"{site.name}: {site.op} stays, {site.reason.code}: {site.reason}"
    error = f", error {site.verified.max_abs_error:.1e} in {site.verified.cases} cases" if site.verified else ""
    return f"{site.name}: {site.op} decomposed{error}"
