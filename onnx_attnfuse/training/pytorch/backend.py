"""The backend `attnfuse` of torch.compile: reads the graphs that Dynamo captures, replaces attention, and hands the rest on.

    torch.compile(module, backend="attnfuse")
    torch.compile(module, backend="attnfuse", options={"rest": "eager", "policy": Policy(flash=False)})

Shapes, types and modes are guarded by Dynamo, which captures a graph anew where they differ. Buffers whose contents decide what a
mask means (a triangle of ones) are guarded here: where one was written to or exchanged, it is read again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from onnx_attnfuse.containment import Subject, failed
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.policy import Policy, read_environment
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.pytorch import rows, runtime_calls
from onnx_attnfuse.training.pytorch.captured_graph import rewrite_graph
from onnx_attnfuse.training.pytorch.comparison import compare
from onnx_attnfuse.training.pytorch.plan import Wishes
from onnx_attnfuse.training.pytorch.reports import Captured, announce, keep
from onnx_attnfuse.training.pytorch.trace import as_array, is_plain
from onnx_attnfuse.training.report import TrainingReport, tell

_KEPT = 8
"""The most versions of one graph that are kept, for as many contents of its buffers."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the backend."""

    rest: str = "inductor"
    """The backend of torch.compile that gets the rewritten graph; `eager` runs it as it is."""
    policy: Policy | None = None
    """Which kernels may be used; None: those of the environment when a graph is captured."""
    flex: bool | None = None
    """Flex attention where a rule says what a mask means: wherever it can be, nowhere, or None: on CUDA."""
    patterns: tuple[Any, ...] = ()
    """Patterns besides the built-in ones: files, folders, or arguments of `onnx_attnfuse.register`."""
    kernels: tuple[str, ...] = ()
    """Kernels to choose from, the one to be tried first in front; see `fuse`."""
    deterministic: bool = False
    """Only kernels whose gradients are the same bit for bit in each run; PyTorch's own switch asks for that, too."""
    verify: bool = False
    """The first step of each graph is held against the graph as it was captured, which is taken where they differ."""

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Settings:
        """The settings in a mapping.

        Raises:
            OptionError: There is no such option or backend, or a variable of the environment is neither 0 nor 1.
        """
        given = dict(options or {})
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise OptionError(f"the backend attnfuse has no option {name!r}; choose {', '.join(names)}")
        settings = cls(**given)
        known = torch.compiler.list_backends(exclude_tags=())
        if settings.rest not in known or settings.rest == "attnfuse":
            raise OptionError(f"rest is {settings.rest!r}; choose inductor, eager or another backend of torch.compile")
        if settings.policy is None:
            read_environment()
        return dataclasses.replace(settings, kernels=tuple(map(known_kernel, settings.kernels)))


def attnfuse(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend: a captured graph with attention replaced, as a function of its inputs.

    Args:
        module: The graph that Dynamo captured.
        inputs: The inputs that it was captured with.
        options: See `Settings`.
        mode: A mode of inductor, handed on to it.

    Raises:
        OptionError: There is no such option.
    """
    return _Compiled(module, inputs, Settings.of(options), mode)


class _Buffer:
    """A buffer whose contents decide the results of a rewritten graph."""

    def __init__(self, place: int, tensor: torch.Tensor) -> None:
        self._place, self._contents = place, tensor.detach().clone()
        self._compared: Any = WeakIdKeyDictionary()  # by tensor: the version that was compared, and what came of it
        self._compared[tensor] = (tensor._version, True)

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether a call still has these contents; a tensor is compared again once it was written to."""
        tensor: torch.Tensor = inputs[self._place]
        same = tensor.shape == self._contents.shape and tensor.dtype == self._contents.dtype
        if not same or isinstance(tensor, FakeTensor):
            return same  # DistributedDataParallel runs the parts of a graph on fakes, for their shapes
        version, found = self._compared.get(tensor, (None, False))
        if version != tensor._version:
            found = torch.equal(tensor.detach().to(self._contents.device), self._contents)
            self._compared[tensor] = (tensor._version, found)
        return bool(found)


@dataclasses.dataclass(eq=False)
class _Version:
    """A captured graph as it is run while its buffers are unchanged."""

    run: Callable[..., Any]
    captured: Captured
    buffers: list[_Buffer]
    to_verify: bool

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether a call has the contents that the graph was read with."""
        return all(buffer.holds(inputs) for buffer in self.buffers)


class _Compiled:
    """A captured graph, compiled for the contents of its buffers."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], settings: Settings, mode: str | None) -> None:
        self._module, self._settings, self._mode = module, settings, mode
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        held = {place: node.meta["grapharg"].example for place, node in enumerate(places) if _is_buffer(node)}
        self._held = frozenset(held)  # known only while Dynamo captures
        self._first = {place: tensor for place, tensor in held.items() if is_plain(tensor)}
        self._versions = [self._build(inputs)]
        self._first = {}

    def __call__(self, *inputs: Any) -> Any:
        """Runs the graph; where no version has the contents of its buffers, they are read first."""
        version = next((version for version in self._versions if version.holds(inputs)), None)
        if version is None:
            version = self._build(inputs)
            self._versions = [version, *self._versions[: _KEPT - 1]]
        keep(version.captured)
        if version.to_verify and not any(isinstance(item, FakeTensor) for item in inputs):
            self._verify(version, inputs)
        return version.run(*inputs)

    def _verify(self, version: _Version, inputs: Sequence[Any]) -> None:
        """Holds the graph against the one that was captured, and takes that one where they differ."""
        version.to_verify = False
        report = version.captured.report
        try:
            comparison = compare(version.run, _copied(self._module), inputs)
        except Refused as refused:
            report = report.unverified(refused.reason)
        except Exception as error:  # noqa: BLE001 - training goes on
            report = report.unverified(failed(error, Subject("verifying a first step")))
        else:
            if comparison.differs:
                report = report.taken_back(Reason("differs", comparison.words))
                version.buffers = []
                version.run = self._rest(_copied(self._module), inputs)
            else:
                report = report.verified(comparison.words)
        version.captured.report = report
        tell([f"attnfuse: {report.first_step}"])

    def _build(self, inputs: Sequence[Any]) -> _Version:
        module = _copied(self._module)
        device = next((str(item.device) for item in inputs if isinstance(item, torch.Tensor)), "cpu")
        buffers: list[_Buffer] = []
        try:
            report, buffers = self._rewrite(module, inputs)
        except Exception as error:  # noqa: BLE001 - training goes on with the graph as it came
            module = _copied(self._module)
            report = TrainingReport(device, (), defect=failed(error, Subject("fusing a captured graph")))
        captured = Captured(report)
        announce(captured)
        return _Version(self._rest(module, inputs), captured, buffers, self._settings.verify and report.fused > 0)

    def _rest(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A graph compiled by the backend for the nodes outside attention; PyTorch keeps it on disk with our functions in it."""
        dynamo: Any = importlib.import_module("torch._dynamo")
        inductor: Any = importlib.import_module("torch._inductor.config")
        backend = dynamo.lookup_backend(self._settings.rest)
        mode = {} if self._mode is None else {"mode": self._mode}
        name = "unsafe_marked_cacheable_functions"
        with inductor.patch({name: getattr(inductor, name) | _traced_functions()} if hasattr(inductor, name) else {}):
            return backend(module, list(inputs), **mode)

    def _rewrite(self, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[TrainingReport, list[_Buffer]]:
        """Replaces attention in a copy of the graph; the report, and the buffers that the graph was read with."""
        policy = self._settings.policy or Policy.from_environment()
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        fakes: list[Any] = [node.meta.get("example_value") for node in places]
        mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None)
        if mode is None:
            return TrainingReport("cpu", ()), []
        held = {
            id(fake): (place, tensor)
            for place, fake in enumerate(fakes)
            if place in self._held and isinstance(fake, torch.Tensor)
            for tensor in [inputs[place] if is_plain(inputs[place]) else self._first.get(place)]
            if tensor is not None
        }
        constants = {mark: functools.partial(as_array, tensor) for mark, (_, tensor) in held.items()}
        mine, switched = self._settings, torch.are_deterministic_algorithms_enabled()
        asked = mine.kernels, mine.deterministic or switched
        wishes = Wishes(policy, mine.flex, tuple(mine.patterns), mine.rest != "eager", *asked)
        found = rewrite_graph(module, fakes, mode, constants, wishes)
        environment = read_environment()
        words = f" ({environment.line(policy)})" if environment.seen and self._settings.policy is None else ""
        return TrainingReport(_device_name(inputs), found.sites, words), [_Buffer(*held[mark]) for mark in found.relied]


def known_kernel(name: str) -> str:
    """The kernel that a name asks for; `flash 3` and `flash 4` are made PyTorch's flash attention, for the whole process.

    Raises:
        OptionError: There is no such kernel, or it is not installed.
    """
    attention: Any = importlib.import_module("torch.nn.attention")
    kernel, _, version = name.lower().partition(" ")
    others: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    versions = ["2", *(item.removeprefix("FA") for item in others)]
    if kernel not in _KERNELS or (version and (kernel != "flash" or version not in versions)):
        known = [*_KERNELS, *(f"flash {item}" for item in versions)]
        raise OptionError(f"kernels names {name!r}; choose from {', '.join(known)}")
    if version and version != "2" and attention.current_flash_attention_impl() != f"FA{version}":
        try:
            attention.activate_flash_attention_impl(f"FA{version}")
        except (ImportError, RuntimeError) as error:
            raise OptionError(f"{name} cannot be used ({error}); install it, or choose flash") from error
    return kernel


_KERNELS = ("flash", "cudnn", "efficient", "flex", "math")


@functools.cache
def _traced_functions() -> dict[str, str]:
    """Functions of ours that depend on their arguments alone, with a version of each: PyTorch may keep what they compile to."""
    modules = (runtime_calls, rows)
    version = hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()
    functions = [item for module in modules for item in vars(module).values() if inspect.isfunction(item)]
    return {f"{item.__module__}.{item.__name__}": version for item in functions if item.__module__.startswith(__package__ or "")}


def _device_name(inputs: Sequence[Any]) -> str:
    kinds = {item.device.type for item in inputs if isinstance(item, torch.Tensor)}
    if "cuda" not in kinds:
        return next(iter(sorted(kinds)), "cpu")
    major, minor = torch.cuda.get_device_capability()
    return TrainingDevice("cuda", major * 10 + minor).name


def _is_buffer(node: fx.Node) -> bool:
    """Whether a placeholder is a buffer of a module: Dynamo noted where it took the tensor from."""
    given = node.meta.get("grapharg")
    source = None if given is None else getattr(given, "source", None)
    return getattr(getattr(source, "base", None), "member", None) == "_buffers"


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose nodes can be exchanged, and of the graphs inside of it."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    if result is not None:
        graph.output(result)
        old = next(node for node in module.graph.nodes if node.op == "output")
        next(node for node in graph.nodes if node.op == "output").meta = copy.copy(old.meta)
    found = fx.GraphModule(module, graph)
    found.meta = copy.copy(module.meta)
    for name, inner in module.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(found, name, _copied(inner))
    return found
