"""Which kernels run in truth: a fused model is run once on a GPU, and what ONNX Runtime prints is held against the forecast."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.api import Result
from onnx_attnfuse.bench.inputs import fitting
from onnx_attnfuse.bench.process import Child, ChildError
from onnx_attnfuse.errors import MissingDependencyError, RunError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.kernels.device import Device, Switches
from onnx_attnfuse.kernels.forecast import forecast_existing
from onnx_attnfuse.kernels.kernel_log import SWITCH, Confirmation, confirm, read_kernel_log
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.kernels.providers import provider
from onnx_attnfuse.reasons import Reason

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
