"""Training with attention fused forward and backward, on PyTorch itself, or with ORTModule in the leaf `ortmodule`.

    from onnx_attnfuse.training import fuse           # PyTorch: the module is compiled where it is

    model = fuse(model)

    from onnx_attnfuse.training import ORTModule      # in the place of onnxruntime's

    model = ORTModule(model)

`wrap` takes either. Scripts that keep their own import of ORTModule call `onnx_attnfuse.training.enable()` once instead. Which
kernels are used is a matter of the environment, or of a `Policy`; at the first step a line for each attention says what became
of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnx_attnfuse.kernels.policy import Policy

if TYPE_CHECKING:
    from onnx_attnfuse.training.front_end import wrap
    from onnx_attnfuse.training.ortmodule.hook import disable, enable
    from onnx_attnfuse.training.ortmodule.module import ORTModule
    from onnx_attnfuse.training.pytorch.module import fuse
    from onnx_attnfuse.training.pytorch.reports import REPORTS
    from onnx_attnfuse.training.report import TrainingReport, TrainingSiteReport

__all__ = ["REPORTS", "ORTModule", "Policy", "TrainingReport", "TrainingSiteReport", "disable", "enable", "fuse", "wrap"]

_HOMES = {
    "REPORTS": "pytorch.reports",
    "ORTModule": "ortmodule.module",
    "TrainingReport": "report",
    "TrainingSiteReport": "report",
    "disable": "ortmodule.hook",
    "enable": "ortmodule.hook",
    "fuse": "pytorch.module",
    "wrap": "front_end",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: some need onnxruntime-training, some torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
