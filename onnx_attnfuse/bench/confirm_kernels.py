"""Which kernels run in truth: a fused model is run once on a GPU, and what ONNX Runtime prints is held against the forecast."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.api import Result
from onnx_attnfuse.bench.process import Child, ChildError, fitting
from onnx_attnfuse.errors import MissingDependencyError, RunError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.kernels.device import Device, Switches
from onnx_attnfuse.kernels.forecast import forecast_existing
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.kernels.providers import provider
from onnx_attnfuse.reasons import Reason

SWITCH = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
"""The variable that makes ONNX Runtime print it."""
_LINE = re.compile(r"Operator=(?P<op>\S+)(?: Node=(?P<node>.*?))? DataType=(?P<dtype>\w+) SdpaKernel=(?P<kernel>\w+)")

Outcome = Literal["as forecast", "another kernel", "did not run", "not forecast"]


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run of one operator."""

    op: str
    node: str
    dtype: str
    kernel: str


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """One operator: its forecast, and the kernel that ran."""

    node: str
    op: str
    forecast: str | None
    """None where the forecast is not known."""
    ran: tuple[str, ...]
    """The kernels that ran, each once."""

    @property
    def outcome(self) -> Outcome:
        """Whether the forecast was right; an operator in a branch that was not taken did not run."""
        if not self.ran:
            return "did not run"
        if self.forecast is None:
            return "not forecast"
        return "as forecast" if set(self.ran) == {self.forecast} else "another kernel"


def read_kernel_log(text: str) -> list[Ran]:
    """The runs that a text tells of, in order; whatever else it holds is passed over."""
    return [
        Ran(found["op"], found["node"] or "", found["dtype"], found["kernel"])
        for found in map(_LINE.search, text.splitlines())
        if found is not None
    ]


def confirm(forecasts: Mapping[str, tuple[str, str | None]], runs: Sequence[Ran]) -> list[Confirmation]:
    """Holds what ran against what was forecast, operator by operator.

    Args:
        forecasts: Operator and kernel by node; None where nothing was forecast.
        runs: The kernels that ran; nodes that ONNX Runtime named itself are at the end.
    """
    ran: dict[str, dict[str, None]] = {}
    ops = {run.node: run.op for run in runs}
    for run in runs:
        ran.setdefault(run.node, {})[run.kernel] = None
    found = [Confirmation(node, op, kernel, tuple(ran.pop(node, ()))) for node, (op, kernel) in forecasts.items()]
    return found + [Confirmation(node, ops[node], None, tuple(kernels)) for node, kernels in ran.items()]


_SECONDS = 300.0
"""How long a run may take."""
LOGGED = "cuda"
"""The execution provider of which ONNX Runtime prints the kernels that it runs."""


def check_gpu() -> int:
    """The architecture of the GPU that models are run on.

    Raises:
        MissingDependencyError: There is none, or onnxruntime cannot use it.
    """
    found = gpus.installed()
    if not found:
        raise MissingDependencyError(
            "running on CUDA needs an NVIDIA GPU, and there is none here; run attnfuse doctor for details"
        )
    from onnx_attnfuse.bench.doctor import examine

    machine = examine({}).machine
    if provider(LOGGED).ort_name not in machine.providers:
        why = machine.broken or "its CPU build is installed, or none"
        raise MissingDependencyError(f"onnxruntime has no CUDA here ({why}); attnfuse doctor says how to get it")
    return found[0].arch


def node_forecasts(model: ir.Model, lengths: Mapping[str, int], device: Device) -> dict[str, tuple[str, str | None]]:
    """Operator and kernel for every attention operator of a model by its node, at chosen sizes; None where that is not enough."""
    found: dict[str, tuple[str, str | None]] = {}
    for scope in scopes(model):
        for node in scope.graph:
            if not is_attention(node):
                continue
            problem = params_of_node(node, scope.facts)
            foreseen = None if isinstance(problem, Reason) else forecast_existing(problem.with_lengths(lengths), device)
            found[node.name or ""] = node.op_type, None if foreseen is None or foreseen.needs is not None else foreseen.kernel
    return found


def confirm_kernels(result: Result, arch: int, lengths: Mapping[str, int]) -> list[Confirmation]:
    """Runs a fused model once on the GPU here, and says for every attention operator whether its kernel was forecast.

    Args:
        result: The result of `optimize`.
        arch: The architecture of that GPU.
        lengths: Numbers for symbolic sizes of its inputs.

    Raises:
        RunError: It did not run; the message says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "fused.onnx"
        result.save(path)
        model = io.load(path)
        inputs = fitting(path, model, lengths, LOGGED, _SECONDS)
        session = result.report.session or Session(provider(LOGGED).ort_name)
        task = {"model": str(path), "ep": LOGGED, "provider_options": dict(session.provider_options)}
        child = Child({**task, **inputs.save(path.with_suffix(".npz"))}, {**session.environment, **SWITCH})
        try:
            with child:
                child.ask(None, _SECONDS)
        except ChildError as error:
            raise RunError(
                f"the fused model did not run on the GPU: {error}; attnfuse bench --ep cuda runs the original too"
            ) from error
        runs = read_kernel_log(child.printed)
        device = Device(LOGGED, arch, Switches(frozenset(session.off), session.any_length))
        return confirm(node_forecasts(model, inputs.lengths, device), runs)
