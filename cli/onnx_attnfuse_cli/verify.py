"""`attnfuse verify`: whether two models compute the same."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse.verify.options import Trials
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.verify.verdict import OutputFinding, Verification


_EXAMPLES = [
    Example(
        "attnfuse verify model.onnx model.attnfuse.onnx",
        "Exits with 0 if they are equal, with 3 and the first difference if not.",
    ),
    Example("attnfuse verify a.onnx b.onnx --dim seq=17 --cases 100", "At one length, on more inputs."),
]


@click.command(
    "verify", cls=Manual, short_help="Run two models on adversarial inputs and compare every output.", examples=_EXAMPLES
)
@click.argument("first", type=click.Path(path_type=pathlib.Path))
@click.argument("second", type=click.Path(path_type=pathlib.Path))
@derived_options(of=Trials)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/verify.md).")
@click.option("-q", "--quiet", is_flag=True, help="Print only problems.")
def command(*, first: pathlib.Path, second: pathlib.Path, as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Run FIRST and SECOND on the same inputs, with every kind of padding in their masks, and compare every output.

    Exits with 0 if they are equal, with 3 if they differ, with 2 if they cannot be run. If they differ, the first intermediate
    value of the same name that differs is reported.
    """
    if quiet and as_json:
        raise click.UsageError("-q and --json contradict each other; choose one")
    import onnx_attnfuse

    found = onnx_attnfuse.verify_models(first, second, Trials(**chosen))
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    elif not quiet:
        for line in _lines(found):
            echo(line)
    if not found.equal:
        echo(f"Error: the models differ: {found.detail}", err=True)
    return Exit.DONE if found.equal else Exit.DIFFERS


def _lines(found: Verification) -> Iterator[str]:
    yield "inputs: " + ", ".join(f"{name} ({kind})" for name, kind in found.kinds)
    for output in found.outputs:
        yield f"{output.name}: {_finding(output)}"
    if found.divergence is not None:
        begins = found.divergence
        yield f"the difference begins at '{begins.value}', {begins.detail}"
        yield f"    computed by {begins.node_in_first} in the first model, by {begins.node_in_second} in the second"
        yield f"    attention: {begins.site}" if begins.site else "    no attention is between it and the last equal values"
    yield from found.notes
    skipped = f", {found.refused} that the first does not run on" if found.refused else ""
    yield f"{'equal' if found.equal else 'different'} in {found.cases} cases{skipped}"


def _finding(output: OutputFinding) -> str:
    parts = ["equal" if not output.differing else f"differs in {output.differing} cases"]
    if output.max_abs_error is not None and output.relative_error is not None:
        parts.append(f"error {output.max_abs_error:.1e}, {output.relative_error:.1e} of the magnitude")
    if output.nan_only_in_first or output.nan_only_in_second:
        parts.append(f"NaN in the first only {output.nan_only_in_first}, in the second only {output.nan_only_in_second}")
    return "; ".join(parts)
