"""`attnfuse bench`: how fast, beside the original and other tools; or ONNX Runtime's attention alone."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from onnx_attnfuse.kernels import providers
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.policy import policy_options
from onnx_attnfuse_cli.show import print_table, progress_bar, start_logging
from onnx_attnfuse_cli.suggestions import Choice
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.bench.compare import Figures
    from onnx_attnfuse.bench.op_sweep import Cell
    from onnx_attnfuse.bench.run import Bench, Contest


_EXAMPLES = [
    Example("attnfuse bench model.onnx", "The fused model against the original, whole and its attention alone."),
    Example("attnfuse bench model.onnx --against onnxscript,onnxruntime --dim seq=512", "Against the results of other tools."),
    Example("attnfuse bench decoder.onnx --cache shared --dim seq=1 --dim past=511", "A decode step, its cache in one buffer."),
    Example("attnfuse bench model.onnx --ep cuda --cuda-graph", "Each captured in a CUDA graph, if it can be."),
    Example("attnfuse bench model.onnx model.attnfuse.onnx", "Two models in turns, and how far their outputs are apart."),
    Example("attnfuse bench --seeds --ep cuda", "ONNX Runtime's attention alone, in TFLOP/s."),
]


@click.command(
    "bench", cls=Manual, short_help="Measure models side by side: whole, and their attention alone.", examples=_EXAMPLES
)
@click.argument("model", type=click.Path(path_type=pathlib.Path), required=False)
@click.argument("other", type=click.Path(path_type=pathlib.Path), required=False)
@click.option(
    "--against",
    default="original",
    show_default=True,
    metavar="NAMES",
    help="Tools to compare with, with commas: original, onnxscript, onnxruntime, or onnxruntime:gpt2 for a model type.",
)
@click.option(
    "--ep", type=Choice(providers.names()), default=providers.FALLBACK, show_default=True, help="Execution provider to run on."
)
@click.option("--runs", type=click.IntRange(min=1), default=30, show_default=True, metavar="N", help="Runs of each model.")
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for the start and for each round of a model.",
)
@click.option(
    "--seeds",
    is_flag=True,
    help="Without MODEL: MultiHeadAttention alone, in TFLOP/s, at the sizes of ONNX Runtime's benchmark table.",
)
@click.option("--small", is_flag=True, help="With --seeds: few and small sizes, for a CPU.")
@derived_options(only=("padding", "dim", "target", "packed_tokens", "always", "keep_outputs", "cache", "kv_cache", "cuda_graph"))
@policy_options
@click.option(
    "--price",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Price of the machine for an hour: also show that of a million tokens, or of a thousand batches.",
)
@click.option(
    "--picture", type=click.Path(path_type=pathlib.Path), metavar="FILE", help="Also draw the times of one MODEL as SVG."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_context
def command(
    context: click.Context,
    *,
    model: pathlib.Path | None,
    other: pathlib.Path | None,
    against: str,
    ep: str,
    runs: int,
    limit: float,
    seeds: bool,
    small: bool,
    price: float | None,
    picture: pathlib.Path | None,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Measure MODEL fused by attnfuse against other tools: the whole model, and its most frequent attention alone.

    With OTHER, run both models as they are, and report the ratio of their times and the differences of their outputs. Times are
    CPU times on one thread, or times on a GPU. Exits with 3 if the outputs differ.

    Each model runs warm in its own process, in turns with the others. Ratios are speeds relative to the original. Without
    --dim a batch has one entry, and a length is at most 128.
    """
    start_logging(verbose=False)
    if seeds == (model is not None):
        raise click.UsageError("give a MODEL, or --seeds without one")
    if small and not seeds:
        raise click.UsageError("--small is for --seeds; give that too, or leave it out")
    arch = 0
    if providers.provider(ep).architectures:
        from onnx_attnfuse.bench.confirm_kernels import check_gpu

        arch = check_gpu()
    if model is None:
        return _seeds(ep, arch, small=small, runs=runs, limit=limit, as_json=as_json)
    from onnx_attnfuse.bench.run import Bench
    from onnx_attnfuse.options import Options

    if other is not None:
        return _pair(context, model, other, Bench(Options(ep=ep, **chosen), (), runs, limit), price=price, as_json=as_json)
    names = [name.strip() for name in against.split(",") if name.strip()]
    options = Options(ep=ep, arch=f"sm{arch}" if arch else None, verify="none", **chosen)
    found = Bench(options, names, runs, limit).model(model)
    if picture:
        from onnx_attnfuse.bench.run import picture as drawn
        from onnx_attnfuse.report.files import write_text

        write_text(drawn(found), picture.absolute())
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(item) for item in found], indent=2))
    else:
        for item in found:
            _show(item, price)
    return Exit.BAD_INPUT if any(item.failed is not None for contest in found for item in contest.figures[:1]) else Exit.DONE


_OF_ONE = frozenset(
    "against padding target packed_tokens always keep_outputs flash efficient sdpa_fallback cache kv_cache picture".split()
)
"""Options that say how one model is fused, or beside what."""


def _pair(
    context: click.Context, first: pathlib.Path, second: pathlib.Path, bench: Bench, *, price: float | None, as_json: bool
) -> int:
    """Two models as they are."""
    given = [name for name in _OF_ONE if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"--{min(given).replace('_', '-')} is for one model; two are run as they are, so leave it out")
    found = bench.pair(first, second)
    outputs = found.outputs
    if as_json:
        plain = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        plain["figures"] = [dataclasses.asdict(item) for item in found.figures]
        click.echo(json.dumps({**plain, "outputs": None if outputs is None else outputs.to_dict()}, indent=2))
    else:
        echo(f"{found.clock}{_sizes(found.lengths)}")
        _show_figures(found.figures, price)
        if outputs is None:
            echo(f"outputs not compared: {found.note}")
        else:
            worst = max((item.max_abs_error or 0.0 for item in outputs.outputs), default=0.0)
            echo(f"outputs: {outputs.detail}, largest difference {worst:.1e}")
    failed = any(item.failed is not None for item in found.figures)
    return Exit.BAD_INPUT if failed else Exit.DONE if outputs is None or outputs.equal else Exit.DIFFERS


def _show(found: Contest, price: float | None) -> None:
    echo(f"{found.what}{_sizes(found.lengths)}")
    if found.note:
        echo(f"    not measured: {found.note}")
        return
    echo(f"    attnfuse fused {found.fused} of {found.candidates}")
    _show_figures(found.figures, price)
    _show_share(found)
    echo("")


def _show_figures(figures: Sequence[Figures], price: float | None) -> None:
    """A table of contenders, and a line for each that failed."""
    from onnx_attnfuse.report.text import columns

    numbers = ("speedup", "min-max", "ms", "middle half", "samples/s", "tokens/s", "MB")
    per_token = any(item.tokens_per_second for item in figures)
    priced = () if price is None else ("price of 1M tokens" if per_token else "price of 1000 batches",)
    print_table(columns(("", *numbers, *priced), [[*_row(item), *_price(item, price)] for item in figures], numbers=numbers))
    for item in figures:
        if item.failed is not None:
            echo(f"{item.name} failed: {item.failed}")
        elif item.uncaptured is not None:
            echo(f"{item.name} runs without a CUDA graph: {item.uncaptured}")


def _show_share(found: Contest) -> None:
    from onnx_attnfuse.bench.roofline import share_in_words

    ours = found.figures[0]
    if found.work is None or ours.ms is None:
        return
    echo(f"{ours.name}, {share_in_words(found.work, found.limit, ours.ms)}")
    if found.work.left_out:
        echo(f"    not counted: {', '.join(found.work.left_out)}")


def _row(item: Figures) -> list[str]:
    if item.failed is not None or item.ms is None or item.ratio is None or item.ratios is None or item.quartiles is None:
        return [item.name, "failed"]
    return [
        item.name,
        f"{item.ratio:.2f}",
        f"{item.ratios[0]:.2f}-{item.ratios[1]:.2f}",
        f"{item.ms:.3f}",
        f"{item.quartiles[0]:.3f}-{item.quartiles[1]:.3f}",
        f"{item.samples_per_second:.1f}",
        "-" if item.tokens_per_second is None else f"{item.tokens_per_second:.0f}",
        "-" if item.megabytes is None else f"{item.megabytes:.0f}",
    ]


def _price(item: Figures, hour: float | None) -> list[str]:
    """The price of a million tokens, or of a thousand batches, of a machine that costs so much an hour."""
    if hour is None or item.ms is None:
        return []
    tokens = item.tokens_per_second
    seconds = 1e6 / tokens if tokens else item.ms
    return [f"{hour / 3600 * seconds:.3g}"]


def _sizes(lengths: Mapping[str, int]) -> str:
    words = ", ".join(f"{name}={number}" for name, number in lengths.items())
    return f" ({words})" if words else ""


def _seeds(ep: str, arch: int, *, small: bool, runs: int, limit: float, as_json: bool) -> int:
    from onnx_attnfuse.bench.op_sweep import kernels, measure, table

    if not providers.provider(ep).architectures and not small:
        raise click.UsageError("--seeds at full size is for CUDA; give --small, or --ep cuda")
    rows, columns = table(small=small, ep=ep), kernels(ep, arch)
    cells: list[Cell] = []
    with progress_bar(shown=True) as progress:
        for cell in measure(rows, columns, ep=ep, runs=runs, seconds=limit):
            cells.append(cell)
            progress("measuring", len(cells), len(rows) * len(columns))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=2))
    else:
        _show_seeds(cells, list(columns))
    return Exit.DONE


def _show_seeds(cells: Sequence[Cell], kernels: Sequence[str]) -> None:
    from onnx_attnfuse.report.text import columns

    rows: list[list[str]] = []
    for start in range(0, len(cells), len(kernels)):
        row = cells[start : start + len(kernels)]
        figures = ["failed" if cell.tflops is None else f"{cell.tflops:.4g}" for cell in row]
        rows.append([",".join(map(str, row[0].size)), row[0].format, *figures])
    print_table(columns(("batch,length,heads,head size", "inputs", *kernels), rows, numbers=kernels, title="TFLOP/s"))
    for cell in cells:
        if cell.failed is not None:
            echo(f"{','.join(map(str, cell.size))} {cell.format} {cell.kernel}: {cell.failed}")
