"""Contenders of a benchmark: the model as it is, as we fuse it, and as other tools do, each made with a time limit."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from onnx_attnfuse.api import optimize
from onnx_attnfuse.bench.inputs import Sample
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.tensors import external_tensors
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import Report

OURS, ORIGINAL = "attnfuse", "original"
_PEERS = ("onnxscript", "onnxruntime")
_MODEL_TYPE = "bert"
_ONNXSCRIPT = """
import sys
import onnx_ir
from onnxscript.rewriter.ort_fusions import optimize_for_ort
model, _ = optimize_for_ort(onnx_ir.load(sys.argv[1]))
onnx_ir.save(model, sys.argv[2], external_data=sys.argv[3] or None)
"""
"""onnxscript has no command for its fusions."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model to run, or why there is none."""

    name: str
    path: pathlib.Path | None
    failed: str | None = None
    provider_options: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    inputs: Sample | None = None
    """Inputs of its own, where its interface is another."""
    buffers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Outputs that are written where an input is, by name: the present of a shared cache."""


def check_names(names: Sequence[str]) -> None:
    """Refuses contenders that do not exist.

    Raises:
        OptionError: There is no such tool.
    """
    for name in names:
        if name.partition(":")[0] not in {ORIGINAL, *_PEERS}:
            raise OptionError(f"there is no contender {name!r}; choose {ORIGINAL}, {', '.join(_PEERS)} or onnxruntime:MODEL_TYPE")


def contenders(
    model: pathlib.Path, names: Sequence[str], options: Options, folder: pathlib.Path, seconds: float
) -> tuple[list[Contender], Report]:
    """Everything that is to be compared: ours first, then in the order of `names`.

    Args:
        model: The model as exported.
        names: Others, `original`, `onnxscript`, `onnxruntime` or `onnxruntime:gpt2`.
        options: How we fuse it.
        folder: Where models are written.
        seconds: The time limit of another tool.

    Returns:
        The contenders, and the report on ours.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An option has no such value.
    """
    result = optimize(model, options)
    path = folder / "attnfuse.onnx"
    result.save(path)
    session = result.report.session
    session_choices: dict[str, Any] = (
        {} if session is None else {"provider_options": session.provider_options, "environment": session.environment}
    )
    others = [
        Contender(name, model) if name == ORIGINAL else _by_peer(name, model, result.report, folder, seconds) for name in names
    ]
    return [Contender(OURS, path, **session_choices), *others], result.report


def _by_peer(name: str, model: pathlib.Path, report: Report, folder: pathlib.Path, seconds: float) -> Contender:
    """A contender whose model another tool makes, in a process of its own."""
    tool, _, kind = name.partition(":")
    path = folder / f"{tool}-{kind or 'model'}.onnx"
    large = any(True for _ in external_tensors(io.load(model)))
    if tool == "onnxscript":
        command = [sys.executable, "-c", _ONNXSCRIPT, str(model), str(path), f"{path.name}.data" if large else ""]
    else:
        command = [sys.executable, "-m", "onnxruntime.transformers.optimizer", "--input", str(model), "--output", str(path)]
        command += [
            "--model_type",
            kind or _MODEL_TYPE,
            *_shape(report, kind),
            *(["--use_external_data_format"] if large else []),
        ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Contender(name, None, f"it took longer than {seconds:g} s over the model")
    if done.returncode or not path.exists():
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        return Contender(name, None, f"it failed on the model: {(lines or ['it printed nothing'])[-1][:300]}")
    return Contender(name, path)


def _shape(report: Report, kind: str) -> list[str]:
    """Heads and width, which the optimizer of ONNX Runtime finds out by itself for BERT only."""
    known = [site for site in report.sites if site.num_heads and site.head_size]
    if kind in {"", _MODEL_TYPE} or not known:
        return ["--num_heads", "0", "--hidden_size", "0"]
    heads, size = known[0].num_heads or 0, known[0].head_size or 0
    return ["--num_heads", str(heads), "--hidden_size", str(heads * size)]
