"""`attnfuse convert`: float32 to a half type, but for what masks, sums and divides."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse.transforms.half_precision.options import Conversion
from onnx_attnfuse_cli.files import output_for, output_option, several, wrote
from onnx_attnfuse_cli.folders import check_free, copy_others, folder_of_model
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.transforms.half_precision.convert import ConversionReport


_EXAMPLES = [
    Example("attnfuse convert model.onnx", "Writes model.float16.onnx, compared with the model on adversarial masks."),
    Example("attnfuse convert exported -o half", "The whole folder of an export, with its configuration and tokenizer."),
    Example("attnfuse convert model.onnx --dtype bfloat16 --keep-io-types", "In bfloat16, inputs and outputs as they were."),
]


@click.command(
    "convert", cls=Manual, short_help="Convert to float16 or bfloat16; masks and sums stay float32.", examples=_EXAMPLES
)
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@output_option(".DTYPE.onnx")
@derived_options(of=Conversion)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (docs/convert.md).")
@click.option("-q", "--quiet", is_flag=True, help="Print only problems.")
def command(*, model: pathlib.Path, output: pathlib.Path | None, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Convert MODEL to a half type. Scores, masks, the statistics of norms and position tables stay float32.

    The result is compared with MODEL on adversarial inputs. If it differs, nothing is written and the exit status is 3.

    With -o, MODEL may be a folder with a config.json: its models are converted, and its other files copied.
    """
    if quiet and as_json:
        raise click.UsageError("-q and --json contradict each other; choose one")
    conversion = Conversion(**chosen)
    folder = folder_of_model((model,), output)
    if folder is None or output is None:
        _convert(model, output_for(model, output, f".{conversion.dtype}.onnx"), conversion, as_json=as_json, quiet=quiet)
        return Exit.DONE
    if as_json:
        raise click.UsageError(f"--json reports on one model, and {folder} is a folder; leave it out")
    models = {item.model: item.out for item in several((folder,), output, None, dry_run=False, whole=folder)}
    check_free(folder, output, models)
    for source, out in models.items():
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            _convert(source, out, conversion, as_json=False, quiet=quiet)
    copied = copy_others(folder, output, models, ())
    if not quiet:
        echo(copied)
    return Exit.DONE


def _convert(model: pathlib.Path, out: pathlib.Path, conversion: Conversion, *, as_json: bool, quiet: bool) -> None:
    """Converts one model, and reports it."""
    import onnx_attnfuse

    result = onnx_attnfuse.convert(model, conversion)
    shared = result.save(out)
    if as_json:
        click.echo(json.dumps(result.report.to_dict(), indent=2))
    elif not quiet:
        echo(*_lines(result.report))
    if not quiet:
        echo(wrote(out, shared), err=True)


def _lines(report: ConversionReport) -> Iterator[str]:
    from onnx_attnfuse.graph.external import size_in_words

    before, after = size_in_words(report.bytes_before), size_in_words(report.bytes_after)
    yield f"{report.nodes} operators in {report.dtype}, weights {before} → {after}"
    if report.islands:
        counted = sorted(report.islands.items(), key=lambda item: (-item[1], item[0]))
        yield f"float32: {', '.join(f'{count} {op}' for op, count in counted)}; {report.casts} Casts added"
    found = report.verification
    if found is not None:
        worst = max((output.relative_error or 0.0 for output in found.outputs), default=0.0)
        yield f"compared on {found.cases} inputs, error {worst:.1e} of the magnitude"
    yield from report.notes
