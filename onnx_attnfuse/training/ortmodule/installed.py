"""The packages that training needs besides this one, and one clear error where they are missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.training.ortmodule.newer_torch import mend_after_import, mend_before_import
from onnx_attnfuse.training.report import tell

_NEEDED = "training needs onnxruntime-training 1.19.2 with torch 2.3 or newer (Python 3.8 to 3.11)"
_REMEDY = 'run pip install "onnx-attnfuse[training]" in an environment of its own, then build ORTModule\'s C++ extensions'


def ortmodule() -> ModuleType:
    """`onnxruntime.training.ortmodule`, imported now, and able to train with the PyTorch that is installed.

    Raises:
        MissingDependencyError: onnxruntime-training is not installed, or cannot be imported with this version of PyTorch.
    """
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnxruntime.training") is None:
        raise MissingDependencyError(f"{_NEEDED}, which is not installed; {_REMEDY}")
    try:
        mended = mend_before_import()
        module = importlib.import_module("onnxruntime.training.ortmodule")
        _ = module.ORTModule
        _ = module.register_graph_optimizer
        mended += mend_after_import()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise MissingDependencyError(
            f"{_NEEDED}, and the installed package cannot be used ({_first_line(error)}); {_REMEDY}"
        ) from error
    if mended:
        tell([f"attnfuse: ORTModule was made to run on torch {importlib.metadata.version('torch')}: {'; '.join(mended)}"])
    return module


def torch_version() -> tuple[int, int]:
    """The installed version of PyTorch."""
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
