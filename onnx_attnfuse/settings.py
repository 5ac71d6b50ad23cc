"""Starting ONNX Runtime as a result asks for it.

os.environ.update(onnx_attnfuse.session_environment(result))
onnxruntime.InferenceSession("model.onnx", onnx_attnfuse.session_options(result), providers=onnx_attnfuse.providers(result))
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from onnx_attnfuse.api import Result
from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.session import Session

_LOG = logging.getLogger(__name__)


def providers(result: Result | Report) -> list[str | tuple[str, dict[str, str]]]:
    """What to pass as `providers`: the execution provider that was planned for with its options, then the CPU's."""
    session = _session(result)
    if session.provider == "CPUExecutionProvider":
        return [session.provider]
    return [(session.provider, dict(session.provider_options)), "CPUExecutionProvider"]


def session_environment(result: Result | Report) -> dict[str, str]:
    """Variables to put into `os.environ` before the session is made: settings that ONNX Runtime takes in no other way."""
    return dict(_session(result).environment)


def session_options(result: Result | Report) -> Any:
    """What to pass as `sess_options`: all of ONNX Runtime's own optimisations, which the fused model was made for.

    Returns:
        An `onnxruntime.SessionOptions`. Where `session_environment` asks for variables that are not set, the log has a warning.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    for name, value in session_environment(result).items():
        if os.environ.get(name) != value:
            _LOG.warning("%s=%s is not set, so ONNX Runtime may choose other kernels than were forecast", name, value)
    try:
        onnxruntime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependencyError("session options need onnxruntime; run pip install 'onnx-attnfuse[cpu]'") from error
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    return options


def _session(result: Result | Report) -> Session:
    report = result.report if isinstance(result, Result) else result
    return report.session or Session("CPUExecutionProvider")
