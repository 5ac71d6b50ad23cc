"""ORTModule with fused attention: onnxruntime's, with one more argument."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from onnx_attnfuse.training.ortmodule.graphs import Graphs
from onnx_attnfuse.training.ortmodule.hook import Chosen, choosing, register
from onnx_attnfuse.training.ortmodule.newer_torch import ortmodule

if TYPE_CHECKING:
    import torch

    from onnx_attnfuse.kernels.policy import Policy
    from onnx_attnfuse.training.report import TrainingReport

_ORIGINAL: Any = ortmodule().ORTModule


class ORTModule(_ORIGINAL):
    """A `torch.nn.Module` that ONNX Runtime trains, its attention fused forward and backward."""

    def __init__(self, module: torch.nn.Module, debug_options: Any = None, *, policy: Policy | None = None) -> None:
        """Wraps a module.

        Args:
            module: The module to train.
            debug_options: onnxruntime's `DebugOptions`.
            policy: Which kernels may be used; by default those of the environment when the training graph is built.
        """
        chosen = Chosen(policy)
        self.__dict__["_attnfuse"] = (
            chosen  # onnxruntime's constructor looks at every attribute, and hands on what it does not know
        )
        register()
        super().__init__(module, debug_options)
        forward = self.__dict__["forward"]
        wrapped = self.__dict__["_torch_module"]
        if hasattr(wrapped, "_execution_manager"):  # else ORTModule has left the module to PyTorch
            chosen.graphs = Graphs(wrapped)

        @functools.wraps(forward)
        def fused(*inputs: Any, **named: Any) -> Any:
            if chosen.graphs is not None:
                chosen.graphs.select(inputs, named)
            with choosing(chosen):
                return forward(*inputs, **named)

        self.__dict__["forward"] = fused

    @property
    def attention_reports(self) -> tuple[TrainingReport, ...]:
        """A report for each training graph that was built so far: none before the first step, one more after each rebuilding."""
        return tuple(self.__dict__["_attnfuse"].reports)
