"""Finds attention in exported ONNX models, fuses it exactly, and says why for every site.

    result = onnx_attnfuse.optimize("model.onnx")
    print(result.report.fused, "of", result.report.candidates)
    result.save("model.attnfuse.onnx")

Everything public is named here; what is not named here may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnx_attnfuse.errors import (
    AttnFuseError,
    InputError,
    InternalError,
    MissingDependencyError,
    ModelError,
    OptionError,
    RunError,
    VerificationError,
)
from onnx_attnfuse.options import Options
from onnx_attnfuse.policy import Policy
from onnx_attnfuse.reasons import Reason

if TYPE_CHECKING:
    from onnx_attnfuse.api import AttentionFusionPass, Result, explain, optimize
    from onnx_attnfuse.catalogue.packs import register
    from onnx_attnfuse.forecasting import forecast
    from onnx_attnfuse.graph.facts import Facts
    from onnx_attnfuse.language import steps
    from onnx_attnfuse.language.grains import score_step, weight_step
    from onnx_attnfuse.report.files import write_report
    from onnx_attnfuse.report.model import Layouts, Report, SiteReport, Verified
    from onnx_attnfuse.session import Session
    from onnx_attnfuse.settings import providers, session_environment, session_options

__all__ = [
    "AttentionFusionPass",
    "AttnFuseError",
    "Facts",
    "InputError",
    "InternalError",
    "Layouts",
    "MissingDependencyError",
    "ModelError",
    "OptionError",
    "Options",
    "Policy",
    "Reason",
    "Report",
    "Result",
    "RunError",
    "Session",
    "SiteReport",
    "VerificationError",
    "Verified",
    "explain",
    "forecast",
    "optimize",
    "providers",
    "register",
    "score_step",
    "session_environment",
    "session_options",
    "steps",
    "weight_step",
    "write_report",
]

_HOMES = {
    "AttentionFusionPass": "api",
    "Facts": "graph.facts",
    "Layouts": "report.model",
    "Report": "report.model",
    "Result": "api",
    "Session": "session",
    "SiteReport": "report.model",
    "Verified": "report.model",
    "explain": "api",
    "forecast": "forecasting",
    "optimize": "api",
    "providers": "settings",
    "register": "catalogue.packs",
    "score_step": "language.grains",
    "session_environment": "settings",
    "session_options": "settings",
    "weight_step": "language.grains",
    "write_report": "report.files",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that importing the package costs next to nothing."""
    if name == "steps":
        return importlib.import_module("onnx_attnfuse.language.steps")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
