"""One way in for both back ends of training: PyTorch itself, or ORTModule."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from onnx_attnfuse.errors import MissingDependencyError, OptionError

if TYPE_CHECKING:
    import torch

    from onnx_attnfuse.kernels.policy import Policy

Backend = Literal["torch", "ortmodule", "auto"]


def wrap(module: torch.nn.Module, backend: Backend = "auto", policy: Policy | None = None, **options: Any) -> torch.nn.Module:
    """A module that is trained with fused attention.

    Args:
        module: The module.
        backend: `torch` compiles the module where it is; `ortmodule` wraps it in ONNX Runtime's; `auto` takes torch, or ORTModule
            where torch is too old and onnxruntime-training is installed.
        policy: Which kernels may be used; by default those of the environment.
        options: Further options of the back end: `fuse`'s, or `ORTModule`'s.

    Returns:
        The module itself, or an ORTModule around it; both have `attention_reports`.

    Raises:
        OptionError: There is no such back end.
        MissingDependencyError: torch is too old, or onnxruntime-training was asked for and is not installed.
    """
    if backend not in {"torch", "ortmodule", "auto"}:
        raise OptionError(f"backend is {backend!r}; choose torch, ortmodule or auto")
    if backend != "ortmodule":
        try:
            fuse: Any = importlib.import_module("onnx_attnfuse.training.pytorch.module").fuse
        except MissingDependencyError:
            if backend == "torch" or not _has_ortmodule():
                raise
        else:
            return fuse(module, policy=policy, **options)
    wrapped: Any = importlib.import_module("onnx_attnfuse.training.ortmodule.module").ORTModule
    return wrapped(module, policy=policy, **options)


def _has_ortmodule() -> bool:
    if importlib.util.find_spec("onnxruntime") is None:
        return False
    return (
        importlib.util.find_spec("onnxruntime.training") is not None
        and importlib.util.find_spec("onnxruntime.training.ortmodule") is not None
    )
