"""`attnfuse explain`: the sites that would be fused, and why the rest would not."""

from __future__ import annotations

import dataclasses
import json as json_format
import pathlib
from typing import Any

import click

from onnx_attnfuse_cli.endings import failed
from onnx_attnfuse_cli.files import Files
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import SECTIONS, derived_options, taken
from onnx_attnfuse_cli.policy import policy_options
from onnx_attnfuse_cli.show import Format, progress_bar, show, show_findings, start_logging
from onnx_attnfuse_cli.terminal import MEANINGS, Exit

FIELDS = (
    "ep arch onnxruntime padding cache dequantise_attention dim same target assume cuda_graph conformance always keep_outputs "
    "patterns skip_patterns only_patterns"
).split()


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Options of `attnfuse explain` besides the fields of `onnx_attnfuse.Options`."""

    json: bool = False
    """Print the report as JSON (docs/report.md)."""
    format: Format = "text"
    """Format of the report. `github`: text, an annotation for each kind of unfused attention, and the job summary. `sarif`: SARIF
    2.1.0 only, for code scanning."""
    report: pathlib.Path | None = None
    """Also write a report: an HTML page with pictures if the name ends in .html, else JSON."""
    verbose: int = dataclasses.field(default=0, metadata={"short": "v", "count": True})
    """Report each attention on its own, even where several are alike, and log to stderr. -vv: also what each pattern did."""


_EXAMPLES = [
    Example("attnfuse explain model.onnx", "A line for each kind of attention."),
    Example(
        "attnfuse explain model.onnx --ep cuda --arch sm80", "For an A100: which kernels would run, and why not faster ones."
    ),
    Example(
        "attnfuse explain model.onnx --json",
        "For a program, here the fused share of all sites: pipe it to jq '.fused / .candidates'.",
    ),
]
_STATUSES = {status: what for status, what in MEANINGS.items() if status != Exit.TOO_FEW} | {
    Exit.DIFFERS: "A pattern of yours failed at a place, which it left as it was."
}


def _print_code(ctx: click.Context, parameter: click.Parameter, code: str | None) -> None:
    if code is None or ctx.resilient_parsing:
        return
    from onnx_attnfuse.report import reason_codes

    text = reason_codes.explained(code)
    if text is None:
        near = " or ".join(map(repr, reason_codes.similar(code)))
        problem = f"{code!r} is no reason code; " + (f"did you mean {near}?" if near else "docs/reasons.md lists them")
        raise click.BadParameter(problem, ctx, parameter)
    click.echo(text)
    ctx.exit()


@click.command(
    "explain",
    cls=Manual,
    short_help="Report what would be fused, and why the rest would not.",
    examples=_EXAMPLES,
    sections=SECTIONS,
    statuses=_STATUSES,
)
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--code",
    metavar="CODE",
    is_eager=True,
    expose_value=False,
    callback=_print_code,
    help="Explain a reason code or a family of codes, with what to do, and do nothing else.",
)
@derived_options(_Wanted)
@derived_options(only=FIELDS)
@policy_options
@click.pass_context
def command(context: click.Context, *, model: pathlib.Path, **chosen: Any) -> int:
    """Report what each attention of MODEL is and whether it would be fused. Writes no model."""
    wanted: _Wanted = taken(_Wanted, chosen)
    if wanted.json and wanted.format != "text":
        raise click.UsageError("--json and --format contradict each other; choose one")
    files = Files(model, None, (wanted.report,) if wanted.report else ())
    files.check()
    start_logging(verbose=wanted.verbose)
    import onnx_attnfuse

    with progress_bar(shown=True) as progress:
        options = onnx_attnfuse.Options(**chosen, pictures=files.has_page, progress=progress)
        report = onnx_attnfuse.explain(model, options=options)
    if wanted.report:
        onnx_attnfuse.write_report(report, wanted.report, model.name, verb="would fuse")
    if wanted.json:
        click.echo(json_format.dumps(report.to_dict(), indent=2))
    elif wanted.format != "sarif":
        show(report, verb="would fuse", verbose=wanted.verbose)
    show_findings({model: report}, wanted.format, is_required=False)
    return failed(report.failures, context.obj)
