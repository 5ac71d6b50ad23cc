"""Contenders on the same inputs, taking turns: every round each of them runs, so that what disturbs one disturbs all.

Contenders are the model as it is, as we fuse it, and as other tools do, each made with a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from onnx_attnfuse.api import optimize
from onnx_attnfuse.bench.process import Child, ChildError, Sample
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.tensors import external_tensors
from onnx_attnfuse.kernels.providers import provider
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.verify.subprocess_runner import Worker

ROUNDS = 5
_WARM = 3
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
class Figures:
    """Times and memory of one contender."""

    name: str
    failed: str | None = None
    uncaptured: str | None = None
    """Why it runs without the CUDA graph that was asked for."""
    ms: float | None = None
    """Median of all runs."""
    fastest: float | None = None
    slowest: float | None = None
    quartiles: tuple[float, float] | None = None
    """Half of all runs lie between these."""
    megabytes: float | None = None
    """Peak memory of the process on a CPU; on a GPU the other memory in use, by whomever."""
    ratio: float | None = None
    """How many times as fast as the original, or else as the last that ran: the median of the rounds."""
    ratios: tuple[float, float] | None = None
    """The smallest and the largest ratio of a round."""
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    share: float | None = None
    """How much of the device's limit was reached: the least time that it takes, by the median; None where no limit is known."""


def run(
    contenders: Sequence[Contender],
    sample: Sample,
    folder: pathlib.Path,
    *,
    ep: str,
    runs: int,
    seconds: float,
    how: Mapping[str, Any] | None = None,
    captured: bool = False,
) -> list[Figures]:
    """Runs a contest.

    Args:
        contenders: The contenders.
        sample: Their inputs.
        folder: Where the inputs are written.
        ep: Execution provider.
        runs: How often each is run, warm.
        seconds: How long each may take for a round, and to start.
        how: More entries of the workers' task: `threads`, and `clock`, which is `cpu` for the time of the process.
        captured: Whether each runs captured, as the execution provider does it; one that cannot be runs as it is.
    """
    arrays = sample.save(folder / "inputs.npz")
    own = {item.name: item.inputs.save(folder / f"inputs-{item.name}.npz") for item in contenders if item.inputs}
    failed = {item.name: item.failed for item in contenders if item.failed}
    times: dict[str, list[list[float]]] = {}
    memory: dict[str, float | None] = {}
    uncaptured: dict[str, str] = {}
    capture = provider(ep).capture if captured else None
    tries: list[Mapping[str, str]] = [{}] if capture is None else [capture.options, {}]
    with contextlib.ExitStack() as stack:
        alive: dict[str, Worker] = {}
        for item in contenders:
            if item.path is None:
                continue
            task: dict[str, Any] = {
                "model": str(item.path),
                "ep": ep,
                "buffers": dict(item.buffers),
                **own.get(item.name, arrays),
                **(how or {}),
            }
            for more in tries:
                options = {**item.provider_options, **more}
                try:
                    alive[item.name], memory[item.name] = _started({**task, "provider_options": options}, item, seconds, stack)
                    break
                except ChildError as error:
                    (uncaptured if more else failed)[item.name] = str(error)
        each = -(-runs // ROUNDS)
        for number in range(ROUNDS):
            names = list(alive)
            turn = number % max(1, len(names))
            for name in (*names[turn:], *names[:turn]):
                block = _timed(alive[name], each, seconds)
                if isinstance(block, str):
                    failed[name] = block
                    del alive[name]
                else:
                    times.setdefault(name, []).append(block)
    found = figures([item.name for item in contenders], times, memory, failed, sample)
    return [dataclasses.replace(item, uncaptured=uncaptured.get(item.name)) for item in found]


def _started(
    task: Mapping[str, Any], contender: Contender, seconds: float, stack: contextlib.ExitStack
) -> tuple[Worker, float | None]:
    """A process in which a contender ran and is warm, and its memory.

    Raises:
        ChildError: It failed, or took too long.
    """
    child = stack.enter_context(Child(task, contender.environment))
    try:
        child.ask(None, seconds)
        return child, child.ask(_WARM, seconds)["megabytes"]
    except ChildError:
        child.end()
        raise


def _timed(child: Worker, runs: int, seconds: float) -> list[float] | str:
    """The times of some runs, or why there are none."""
    try:
        return child.ask(runs, seconds)["ms"]
    except ChildError as error:
        return str(error)


def figures(
    names: Sequence[str],
    times: Mapping[str, Sequence[Sequence[float]]],
    memory: Mapping[str, float | None],
    failed: Mapping[str, str | None],
    sample: Sample,
) -> list[Figures]:
    """Medians, quartiles and ratios of all contenders; `times` in milliseconds by contender and round."""
    running = [name for name in names if name not in failed and name in times]
    base = ORIGINAL if ORIGINAL in running else running[-1] if running else ""
    found: list[Figures] = []
    for name in names:
        if name not in running:
            found.append(Figures(name, failed.get(name) or "it did not run"))
            continue
        every = sorted(time for block in times[name] for time in block)
        middle = statistics.median(every)
        pairs = zip(times[base], times[name], strict=False)
        ratios = sorted(statistics.median(theirs) / statistics.median(own) for theirs, own in pairs)
        tokens = sample.tokens
        found.append(
            Figures(
                name,
                ms=middle,
                fastest=every[0],
                slowest=every[-1],
                quartiles=_quartiles(every),
                megabytes=memory.get(name),
                ratio=statistics.median(ratios),
                ratios=(ratios[0], ratios[-1]),
                samples_per_second=1e3 * sample.batch / middle,
                tokens_per_second=None if tokens is None else 1e3 * tokens / middle,
            )
        )
    return found


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


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
