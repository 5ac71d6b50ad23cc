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
    from onnx_attnfuse.api import (
        AttentionFusionPass,
        Converted,
        Result,
        Unfused,
        convert,
        explain,
        optimize,
        unfuse,
        verify_models,
    )
    from onnx_attnfuse.catalogue.packs import register
    from onnx_attnfuse.converting.options import Conversion
    from onnx_attnfuse.converting.report import ConversionReport
    from onnx_attnfuse.forecasting import forecast
    from onnx_attnfuse.graph.facts import Facts
    from onnx_attnfuse.language import steps
    from onnx_attnfuse.language.grains import score_step, weight_step
    from onnx_attnfuse.report.files import write_report
    from onnx_attnfuse.report.model import Layouts, Report, SiteReport
    from onnx_attnfuse.session import Session
    from onnx_attnfuse.settings import providers, session_environment, session_options
    from onnx_attnfuse.unfusing.report import UnfusedSite, UnfuseReport
    from onnx_attnfuse.verify.trials import Trials
    from onnx_attnfuse.verify.verdict import Verified
    from onnx_attnfuse.verify.verification import Divergence, OutputFinding, Verification

__all__ = [
    "AttentionFusionPass",
    "AttnFuseError",
    "Conversion",
    "ConversionReport",
    "Converted",
    "Divergence",
    "Facts",
    "InputError",
    "InternalError",
    "Layouts",
    "MissingDependencyError",
    "ModelError",
    "OptionError",
    "Options",
    "OutputFinding",
    "Policy",
    "Reason",
    "Report",
    "Result",
    "RunError",
    "Session",
    "SiteReport",
    "Trials",
    "UnfuseReport",
    "Unfused",
    "UnfusedSite",
    "Verification",
    "VerificationError",
    "Verified",
    "convert",
    "explain",
    "forecast",
    "optimize",
    "providers",
    "register",
    "score_step",
    "session_environment",
    "session_options",
    "steps",
    "unfuse",
    "verify_models",
    "weight_step",
    "write_report",
]

_HOMES = {
    "AttentionFusionPass": "api",
    "Conversion": "converting.options",
    "ConversionReport": "converting.report",
    "Converted": "api",
    "Divergence": "verify.verification",
    "Facts": "graph.facts",
    "Layouts": "report.model",
    "OutputFinding": "verify.verification",
    "Report": "report.model",
    "Result": "api",
    "Session": "session",
    "SiteReport": "report.model",
    "Trials": "verify.trials",
    "UnfuseReport": "unfusing.report",
    "Unfused": "api",
    "UnfusedSite": "unfusing.report",
    "Verification": "verify.verification",
    "Verified": "verify.verdict",
    "convert": "api",
    "explain": "api",
    "forecast": "forecasting",
    "optimize": "api",
    "providers": "settings",
    "register": "catalogue.packs",
    "score_step": "language.grains",
    "session_environment": "settings",
    "session_options": "settings",
    "unfuse": "api",
    "verify_models": "api",
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
