"""The graph optimizer that ONNX Runtime calls with every gradient graph, registered once for the process."""

from __future__ import annotations

import contextlib
import contextvars
import os
import pathlib
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from onnx_attnfuse.containment import Subject, failed
from onnx_attnfuse.kernels.policy import Policy, read_environment
from onnx_attnfuse.training.ortmodule.newer_torch import ortmodule, torch_version
from onnx_attnfuse.training.ortmodule.shape_inference import forgive
from onnx_attnfuse.training.ortmodule.symbolics import register as register_symbolics
from onnx_attnfuse.training.report import debug_level, tell

if TYPE_CHECKING:
    import onnx

    from onnx_attnfuse.graph.constants import Array
    from onnx_attnfuse.training.kernels import TrainingDevice
    from onnx_attnfuse.training.ortmodule.graphs import Graphs
    from onnx_attnfuse.training.report import TrainingReport

_SAVED = "attnfuse_{number}_{when}.onnx"
_DEFAULT_OPSET = 17


class Chosen:
    """A module's policy, and the reports on its training graphs."""

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        """The kernels to use; None: those of the environment when the graph is built."""
        self.reports: list[TrainingReport] = []
        """A report for each training graph that was built."""
        self.graphs: Graphs | None = None
        """The graphs of the one module that this is chosen for; None: any module's."""


class _Hook:
    """The registration: the only state of this process."""

    def __init__(self) -> None:
        self.registered = False
        self.everywhere: Chosen | None = None
        """The choice for modules that ask for nothing; None: nothing is fused for them."""
        self.graphs = 0

    def register(self) -> None:
        """Registers for all devices and modules, the first time it is called."""
        if not self.registered:
            ortmodule().register_graph_optimizer(priority=1)(self)
            register_symbolics(_opset(), self.policy)
            forgive(lambda: self.policy() is not None)
            self.registered = True

    def policy(self) -> Policy | None:
        """The policy of the module that is exported or built now; None if nothing is fused in it."""
        chosen = _CHOSEN.get() or self.everywhere
        return None if chosen is None else chosen.policy or Policy.from_environment()

    def __call__(self, graph: onnx.GraphProto) -> None:
        """Fuses a gradient graph in place."""
        chosen = _CHOSEN.get() or self.everywhere
        if chosen is not None:
            self.graphs += 1
            buffers = {} if chosen.graphs is None else chosen.graphs.contents()
            report = _optimize(graph, chosen.policy or Policy.from_environment(), self.graphs, buffers)
            chosen.reports.append(report)
            if chosen.graphs is not None:
                chosen.graphs.hold(sorted(report.buffers))


_HOOK = _Hook()
_CHOSEN: contextvars.ContextVar[Chosen | None] = contextvars.ContextVar("attnfuse_chosen", default=None)


def enable(policy: Policy | None = None) -> Chosen:
    """Fuses attention in every ORTModule that builds its training graph from now on.

    Args:
        policy: Which kernels may be used; by default those of the environment at that time.

    Returns:
        Where the reports on these graphs will be.

    Raises:
        MissingDependencyError: onnxruntime-training is not installed, or cannot be used.
    """
    _HOOK.register()
    _HOOK.everywhere = Chosen(policy)
    return _HOOK.everywhere


def disable() -> None:
    """Leaves graphs that are built from now on alone, but those of `onnx_attnfuse.training.ORTModule`."""
    _HOOK.everywhere = None


def register() -> None:
    """Registers the graph builder and the exports with ORTModule; nothing is fused by that alone."""
    _HOOK.register()


@contextlib.contextmanager
def choosing(chosen: Chosen) -> Generator[None]:
    """Fuses, as `chosen` says, the training graphs that are built inside the block."""
    token = _CHOSEN.set(chosen)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def _optimize(graph: onnx.GraphProto, policy: Policy, number: int, buffers: Mapping[str, Array]) -> TrainingReport:
    """Fuses one graph and logs the report on it."""
    import dataclasses

    import onnx_ir as ir

    from onnx_attnfuse.training.ortmodule.pipeline import fuse_graph
    from onnx_attnfuse.training.report import TrainingReport

    debug = debug_level()
    if debug > 1:
        _save(graph, number, "before")
    read = ir.serde.deserialize_graph(graph)
    read.opset_imports[""] = _opset()  # the protobuf lacks it
    device = _device()
    try:
        report = dataclasses.replace(fuse_graph(read, device, policy, buffers=buffers), policy=_words(policy))
    except Exception as error:  # noqa: BLE001 - training goes on with the graph as it came
        report = TrainingReport(device.name, (), defect=failed(error, Subject("fusing a gradient graph")))
    if report.fused:
        graph.CopyFrom(ir.serde.serialize_graph(read))
    if debug > 1:
        _save(graph, number, "after")
    tell(report.lines())
    return report


def _device() -> TrainingDevice:
    """The device that this process trains on."""
    import torch

    from onnx_attnfuse.training.kernels import TrainingDevice

    if not torch.cuda.is_available():
        return TrainingDevice("cpu", torch=torch_version())
    major, minor = torch.cuda.get_device_capability()
    return TrainingDevice("cuda", major * 10 + minor, torch_version())


def _opset() -> int:
    """The opset that ORTModule exports with."""
    return int(os.environ.get("ORTMODULE_ONNX_OPSET_VERSION", _DEFAULT_OPSET))


def _words(policy: Policy) -> str:
    environment = read_environment()
    return f" ({environment.line(policy)})" if environment.seen else ""


def _save(graph: onnx.GraphProto, number: int, when: str) -> None:
    """Writes a graph to the working directory."""
    import onnx

    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", _DEFAULT_OPSET)])
    path = pathlib.Path(_SAVED.format(number=number, when=when))
    path.write_bytes(model.SerializeToString())
