"""Where ONNX Runtime's inference of symbolic shapes fails, ORTModule goes on without it.

It ends in an assertion without a word where a shape comes about in a way that it does not know. Shapes only make the graph of
gradients smaller: unknown shapes are compared when it runs.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from typing import Any

from onnx_attnfuse.training.report import tell


def forgive(is_ours: Callable[[], bool]) -> None:
    """Lets graphs be built without symbolic shapes where these cannot be inferred.

    Args:
        is_ours: Whether attention is fused in the module that is exported; others fail as ever.
    """
    manager: Any = importlib.import_module("onnxruntime.training.ortmodule._graph_transition_manager").GraphTransitionManager
    original = manager._infer_shapes

    @functools.wraps(original)
    def infer(model: Any) -> Any:
        try:
            return original(model)
        except Exception as error:
            if not is_ours():
                raise
            tell([f"attnfuse: ONNX Runtime cannot infer the shapes of this module ({_cause(error)}); it is trained without them"])
            return model

    manager._infer_shapes = staticmethod(infer)


def _cause(error: Exception) -> str:
    """The error in a few words: its first line, or where it was raised if it says nothing."""
    text = str(error).strip()
    place = traceback.extract_tb(error.__traceback__)[-1].name
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else f"{type(error).__name__} in {place}"
