"""`attnfuse doctor`: installed packages, missing ones, and the attention that this machine can use."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.bench.doctor import Diagnosis


_EXAMPLES = [
    Example("attnfuse doctor", "Lists packages and devices, missing ones too, and the lines to export."),
    Example("attnfuse doctor --json", "For a program, or a bug report."),
]


@click.command(
    "doctor", cls=Manual, short_help="Report installed and missing packages, and which kernels run here.", examples=_EXAMPLES
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(*, as_json: bool) -> int:
    """Report installed and missing packages, how to install these, and which kernels run on this machine.

    With torch it also asks the questions by which ORTModule chooses its attention for training: the first yes decides.
    """
    from onnx_attnfuse.bench.doctor import examine

    found = examine()
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
    else:
        echo(*_lines(found))
    return Exit.DONE


def _as_json(found: Diagnosis) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "chosen": found.chosen.name if found.chosen else None}


def _lines(found: Diagnosis) -> Iterator[str]:
    machine = found.machine
    yield f"system               {machine.system}, Python {machine.python}"
    for package, version in machine.versions.items():
        yield f"{package:<21}{version or '-'}"
    yield f"providers            {', '.join(machine.providers) or machine.broken or '-'}"
    for name, written in found.records.items():
        yield f"record               {name}: {written}"
    for name, tried in found.tables.items():
        yield f"tested               {name}: {tried}"
    for gpu in machine.gpus:
        yield f"GPU                  {gpu.name}, compute capability {gpu.capability}, {gpu.memory}, driver {gpu.driver}"
    if not machine.gpus:
        yield "GPU                  -"
    for name, value in {**found.environment.seen, **found.kernel_variables}.items():
        yield f"set                  {name}={value}"
    yield ""
    for item in found.missing:
        yield f"missing: {item.what}"
        yield f"    {item.line}"
    if not found.missing:
        yield "nothing is missing"
    yield ""
    if machine.has("torch"):
        yield from _training(found)
    yield "attention of attnfuse: without options each site gets the fastest kernel of its device"
    yield from (f"    export {line}    to fuse only what runs these kernels" for line in found.exports)


def _training(found: Diagnosis) -> Iterator[str]:
    absent = "" if found.machine.has("onnxruntime-training") else " (onnxruntime-training is not installed)"
    yield f"attention of ORTModule, in training{absent}:"
    for step in found.steps:
        yield f"    {step.question} {'yes' if step.holds else 'no'}: {step.because}"
        if step is found.chosen:
            yield from (f"        export {line}" for line in step.exports)
            break
