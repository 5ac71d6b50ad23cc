"""Modules with fused attention: the module itself, its forward compiled by the backend of this package."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.training.pytorch.backend import Settings, attnfuse
from onnx_attnfuse.training.pytorch.reports import Reports

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.policy import Policy

DynamicShapes = Mapping[str, Mapping[int, Any]]
"""By the name of an argument the axes whose lengths change."""
_Module = TypeVar("_Module", bound=torch.nn.Module)


def fuse(
    module: _Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    policy: Policy | None = None,
    *,
    rest: str = "inductor",
    flex: bool | None = None,
    patterns: Sequence[Any] = (),
    kernels: Sequence[str] = (),
    deterministic: bool = False,
    verify: bool = False,
) -> _Module:
    """Fuses the attention of a module, forward and backward, wherever it is called from now on.

    The module stays as it is, with its parameters, hooks and state; it gets an attribute `attention_reports`, a sequence with a
    report for each graph that it ran. Modules of one class with equal options share their graphs, as under `module.compile`.
    A copy of the module is not compiled, by PyTorch's own rule, until it is fused.

    Args:
        module: The module.
        example_inputs: Positional or named arguments that it is captured with now; by default the first call does that.
        dynamic_shapes: Axes whose lengths change from call to call, so that one graph serves them all.
        policy: Which kernels may be used; by default those of the environment when a graph is captured.
        rest: The backend of torch.compile for everything else; `eager` leaves it alone.
        flex: Flex attention where a rule says what a mask means: wherever it can be, nowhere, or None: on CUDA.
        patterns: Patterns besides the built-in ones, by the same files and objects that `onnx_attnfuse.optimize` takes.
        kernels: The kernels to choose from, the one to be tried first in front: `flash`, `cudnn`, `efficient`, `flex`, `math`.
            `flash 3` and `flash 4` are versions that PyTorch can activate; another attention than these take stays.
        deterministic: Only kernels whose gradients are the same bit for bit in each run; on CUDA, flash and efficient are so
            under `torch.use_deterministic_algorithms(True)`, which asks for it by itself.
        verify: The first step of each graph is run without fusing as well; where results or gradients differ, nothing is fused.
            That step takes the time and the memory of the module as it is, and of a copy of its parameters.

    Returns:
        The module.

    Raises:
        OptionError: There is no such backend or pattern, or an axis of an argument that is not there.
    """
    load(Options(patterns=tuple(patterns)))
    asked = {"kernels": tuple(kernels), "deterministic": deterministic, "verify": verify}
    options = {"rest": rest, "policy": policy, "flex": flex, "patterns": tuple(patterns), **asked}
    Settings.of(options)
    module.compile(backend=attnfuse, options=options)
    reports = Reports()
    call = reports.around(module.__dict__["_compiled_call_impl"])
    module.__dict__["_compiled_call_impl"] = call if dynamic_shapes is None else _marking(module, call, dynamic_shapes)
    module.__dict__["attention_reports"] = reports
    if example_inputs is not None:
        _capture(module, example_inputs)
    return module


def _marking(module: torch.nn.Module, call: Callable[..., Any], shapes: DynamicShapes) -> Callable[..., Any]:
    """A call that marks axes of its arguments as changing.

    Raises:
        OptionError: The module takes no such argument.
    """
    dynamo: Any = importlib.import_module("torch._dynamo")
    signature = inspect.signature(module.forward)
    for name in shapes:
        if name not in signature.parameters:
            raise OptionError(f"dynamic_shapes names {name!r}; choose from {', '.join(signature.parameters)}")

    @functools.wraps(call)
    def marked(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind_partial(*arguments, **named).arguments
        for name, axes in shapes.items():
            tensor = bound.get(name)
            if isinstance(tensor, torch.Tensor):
                for axis in axes:
                    dynamo.maybe_mark_dynamic(tensor, axis)
        return call(*arguments, **named)

    return marked


def _capture(module: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> None:
    """Calls a module once, and puts its buffers and the random state back."""
    kept = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng():
        if isinstance(inputs, Mapping):
            module(**inputs)
        else:
            module(*inputs)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in kept and not torch.equal(buffer, kept[name]):
                buffer.copy_(kept[name])
