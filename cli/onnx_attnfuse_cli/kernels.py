"""`attnfuse kernels`: which kernel runs for each attention on which device, and why not a faster one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse.kernels import providers
from onnx_attnfuse_cli.endings import failed
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.policy import policy_options
from onnx_attnfuse_cli.show import print_table, progress_bar, start_logging
from onnx_attnfuse_cli.suggestions import Choice
from onnx_attnfuse_cli.terminal import MEANINGS, Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.bench.confirm_kernels import Confirmation
    from onnx_attnfuse.report.model import Report


_EXAMPLES = [
    Example("attnfuse kernels model.onnx", "For the GPU here, or for an A100 and an H100."),
    Example(
        "attnfuse kernels model.onnx --arch sm80,sm90,cpu --dtype float16 --seq 2048",
        "As if in float16, with 2048 queries and keys.",
    ),
    Example("attnfuse kernels model.onnx --confirm", "Runs it on the GPU here, and compares operator by operator."),
]
_STATUSES = {
    Exit.DONE: "Done.",
    Exit.BAD_INPUT: "The command line or the model cannot be used, or there is no GPU to confirm on.",
    Exit.DIFFERS: "Another kernel ran than predicted (--confirm).",
    Exit.DEFECT: MEANINGS[Exit.DEFECT],
}


@click.command(
    "kernels",
    cls=Manual,
    short_help="Predict the kernel of each attention on each device; --confirm runs it.",
    examples=_EXAMPLES,
    statuses=_STATUSES,
)
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.option("--arch", help="Devices, such as sm80,sm90 or cpu.  [default: the GPU here, or sm80,sm90]")
@click.option("--dtype", type=Choice(["float32", "float16", "bfloat16"]), help="Predict as if the model had this type.")
@click.option("--seq", type=click.IntRange(min=1), metavar="N", help="Number of queries and keys, for any names of dimensions.")
@derived_options(only=("padding", "dim", "target", "always", "keep_outputs"))
@policy_options
@click.option("--confirm", is_flag=True, help="Run the fused model on the GPU here and compare, operator by operator.")
@click.option("--json", "as_json", is_flag=True, help="Print reports as JSON, by device (docs/report.md).")
@click.option(
    "-v", "--verbose", count=True, help="Report each attention on its own, even where several are alike, and log to stderr."
)
@click.pass_context
def command(
    context: click.Context,
    *,
    model: pathlib.Path,
    arch: str | None,
    dtype: str | None,
    seq: int | None,
    confirm: bool,
    as_json: bool,
    verbose: int,
    **chosen: Any,
) -> int:
    """Report which kernel ONNX Runtime will run for each attention of MODEL on each device, and why not a faster one.

    With --confirm the exit status is 3 if another kernel runs than predicted.
    """
    start_logging(verbose=verbose)
    if confirm and (arch or dtype):
        raise click.UsageError("--confirm runs the model as it is on the GPU here; leave --arch and --dtype out")
    if confirm:
        return _confirmed(model, seq, as_json, chosen)
    from onnx_attnfuse.fusion.pipeline import forecast
    from onnx_attnfuse.report.text import ForecastText

    reports: dict[str, Report] = {}
    with progress_bar(shown=True) as progress:
        for name, device in _devices(arch).items():
            reports[name] = forecast(model, dtype=dtype, length=seq, progress=progress, **device, **chosen)
    if as_json:
        click.echo(json.dumps({name: report.to_dict() for name, report in reports.items()}, indent=2))
    else:
        print_table(ForecastText(reports, fold=not verbose))
    return failed(dict.fromkeys(failure for report in reports.values() for failure in report.failures), context.obj)


def _devices(arch: str | None) -> Mapping[str, Mapping[str, str]]:
    """Options by the name of a device."""
    if arch is None:
        from onnx_attnfuse.kernels import gpus

        names = list(dict.fromkeys(f"sm{gpu.arch}" for gpu in gpus.installed())) or ["sm80", "sm90"]
    else:
        names = [name.strip() for name in arch.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--arch names no device; choose some, such as sm80,sm90 or cpu")
    return {name: {"ep": name} if name in providers.names() else {"ep": "auto", "arch": name} for name in names}


def _confirmed(model: pathlib.Path, seq: int | None, as_json: bool, chosen: Mapping[str, Any]) -> int:
    from onnx_attnfuse.bench.confirm_kernels import LOGGED, check_gpu, confirm_kernels

    arch = check_gpu()
    from onnx_attnfuse.api import optimize
    from onnx_attnfuse.fusion.pipeline import sequence_symbols
    from onnx_attnfuse.graph import io

    dim: dict[str, int] = {**dict.fromkeys(sequence_symbols(io.load(model)) if seq else (), seq or 0), **chosen["dim"]}
    choices: dict[str, Any] = {**chosen, "dim": dim, "ep": LOGGED, "arch": f"sm{arch}", "verify": "none"}
    result = optimize(model, **choices)
    found = confirm_kernels(result, arch, dim)
    if as_json:
        click.echo(json.dumps([_as_json(item) for item in found], indent=2))
    else:
        _show_confirmed(found)
    return Exit.DIFFERS if any(item.outcome == "another kernel" for item in found) else Exit.DONE


def _as_json(item: Confirmation) -> dict[str, Any]:
    return {"node": item.node, "op": item.op, "forecast": item.forecast, "ran": list(item.ran), "outcome": item.outcome}


def _show_confirmed(found: Sequence[Confirmation]) -> None:
    from onnx_attnfuse.report.text import columns, plain

    rows = [(item.op, plain(item.node), item.forecast or "-", ", ".join(item.ran) or "-", item.outcome) for item in found]
    print_table(columns(("operator", "node", "predicted", "ran", ""), rows))
    right = sum(item.outcome == "as forecast" for item in found)
    echo(f"{right} of {sum(bool(item.ran) for item in found)} operators that ran had the predicted kernel")
