"""`attnfuse conformance`: every form of every fused operator on an execution provider here, held against its reference."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from onnx_attnfuse_cli.files import check_place
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.show import print_table, progress_bar
from onnx_attnfuse_cli.terminal import MEANINGS, Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.conformance import Conformance


_EXAMPLES = [
    Example("attnfuse conformance --json cpu.json", "All forms on the CPU; `optimize --conformance` reads the table."),
    Example("attnfuse conformance --html cpu.html", "The same as a page: operator, mask, type and size, with each reason."),
    Example(
        "attnfuse conformance --ep qnn --provider-option backend_path=libQnnHtp.so --operator onnx.Attention --limit 40",
        "The most telling forms of one operator.",
    ),
]
_STATUSES = {
    Exit.DONE: "No form gave wrong results.",
    Exit.BAD_INPUT: "The command line cannot be used, or the execution provider is not installed.",
    Exit.DIFFERS: "Forms gave wrong results; the summary names them.",
    Exit.DEFECT: MEANINGS[Exit.DEFECT],
}


def _options(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """`name=value` as a mapping."""
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{item!r} is not NAME=VALUE", ctx, parameter)
        found[name] = value
    return found


@click.command(
    "conformance",
    cls=Manual,
    short_help="Test every form of every fused operator on an execution provider against NumPy.",
    examples=_EXAMPLES,
    statuses=_STATUSES,
)
@click.option(
    "--ep", default="cpu", show_default=True, metavar="NAME", help="Execution provider, as doctor lists them: cpu, openvino."
)
@click.option(
    "--provider-option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_options,
    help="Option of the provider. Repeatable.",
)
@click.option("--operator", metavar="NAME", help="Only this operator, such as onnx.Attention.  [default: all]")
@click.option(
    "--dtype",
    metavar="NAME",
    help="Only this element type: float32, float16 or bfloat16.  [default: those of the provider]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N forms of each operator.")
@click.option("--json", "path", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="Write the table as JSON.")
@click.option(
    "--html", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="Write the table as an HTML page, with each reason."
)
def command(
    *,
    ep: str,
    options: Mapping[str, str],
    operator: str | None,
    dtype: str | None,
    limit: int | None,
    path: pathlib.Path | None,
    html: pathlib.Path | None,
) -> int:
    """Test every form of every fused operator on an installed execution provider.

    A form is an operator with an element type, a mask, a head size and so on, run as a model of one node. It is compared with
    the operator in NumPy and timed against the same attention of MatMul and Softmax. Forms run in another process, because some
    crash it.
    """
    from onnx_attnfuse.bench.conformance.installed import find
    from onnx_attnfuse.bench.conformance.run import failures, run
    from onnx_attnfuse.kernels.conformance import to_json
    from onnx_attnfuse.report.files import write_text
    from onnx_attnfuse.report.html import check_installed, conformance_page

    for file in filter(None, (path, html)):
        check_place(file)
    if html is not None:
        check_installed()
    with progress_bar(shown=True) as progress:
        table = run(find(ep, options), operator=operator, dtype=dtype, limit=limit, progress=progress)
    if path is not None:
        write_text(to_json(table), path)
    if html is not None:
        write_text(conformance_page(table), html)
    _show(table)
    for line in failures(table):
        echo(line)
    echo(f"{sum(case.verdict == 'right' for case in table.cases)} of {len(table.cases)} forms are right on {table.ep}")
    if path is not None:
        echo(f"wrote {path}; attnfuse optimize --conformance {path} leaves out what failed")
    if html is not None:
        echo(f"wrote {html}")
    return Exit.DIFFERS if any(case.verdict == "wrong" for case in table.cases) else Exit.DONE


def _show(table: Conformance) -> None:
    """Print a line for each operator and element type."""
    from onnx_attnfuse.bench.conformance.run import lines
    from onnx_attnfuse.report.text import columns

    counts = ("right", "wrong", "unsupported", "on the CPU", "largest error", "decomposed", "time, of decomposed")
    print_table(columns(("operator", "type", *counts), lines(table), numbers=counts))
