"""Finds attention in exported ONNX models, fuses it exactly, and says why for every site.

    result = onnx_attnfuse.optimize("model.onnx")
    print(result.report.fused, "of", result.report.candidates)
    result.save("model.attnfuse.onnx")

Everything public is named here; other names may change.
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
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.options import Options
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
        providers,
        session_environment,
        session_options,
        unfuse,
        verify_models,
        write_genai_config,
    )
    from onnx_attnfuse.fusion.pipeline import forecast
    from onnx_attnfuse.graph.facts import Facts
    from onnx_attnfuse.kernels.ort_settings import Session
    from onnx_attnfuse.language import steps
    from onnx_attnfuse.language.decorators import score_step, weight_step
    from onnx_attnfuse.language.registry.discovery import register
    from onnx_attnfuse.mixers.exporting import linear_attention, mixers_as_operators
    from onnx_attnfuse.report.files import write_report
    from onnx_attnfuse.report.model import CaptureReport, Layouts, Report, SiteReport
    from onnx_attnfuse.serving.decoder import ServedDecoder
    from onnx_attnfuse.transforms.decompose.decompose import UnfusedSite, UnfuseReport
    from onnx_attnfuse.transforms.half_precision.convert import ConversionReport
    from onnx_attnfuse.transforms.half_precision.options import Conversion
    from onnx_attnfuse.verify.options import Trials
    from onnx_attnfuse.verify.verdict import Divergence, OutputFinding, Verification, Verified

__all__ = [
    "AttentionFusionPass",
    "AttnFuseError",
    "CaptureReport",
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
    "ServedDecoder",
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
    "linear_attention",
    "mixers_as_operators",
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
    "write_genai_config",
    "write_report",
]

_HOMES = {
    "AttentionFusionPass": "api",
    "CaptureReport": "report.model",
    "Conversion": "transforms.half_precision.options",
    "ConversionReport": "transforms.half_precision.convert",
    "Converted": "api",
    "Divergence": "verify.verdict",
    "Facts": "graph.facts",
    "Layouts": "report.model",
    "OutputFinding": "verify.verdict",
    "Report": "report.model",
    "Result": "api",
    "Session": "kernels.ort_settings",
    "ServedDecoder": "serving.decoder",
    "SiteReport": "report.model",
    "Trials": "verify.options",
    "UnfuseReport": "transforms.decompose.decompose",
    "Unfused": "api",
    "UnfusedSite": "transforms.decompose.decompose",
    "Verification": "verify.verdict",
    "Verified": "verify.verdict",
    "convert": "api",
    "explain": "api",
    "forecast": "fusion.pipeline",
    "linear_attention": "mixers.exporting",
    "mixers_as_operators": "mixers.exporting",
    "optimize": "api",
    "providers": "api",
    "register": "language.registry.discovery",
    "score_step": "language.decorators",
    "session_environment": "api",
    "session_options": "api",
    "unfuse": "api",
    "verify_models": "api",
    "weight_step": "language.decorators",
    "write_genai_config": "api",
    "write_report": "report.files",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that importing the package costs next to nothing."""
    if name == "steps":
        return importlib.import_module("onnx_attnfuse.language.steps")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, also those that were not used yet."""
    return sorted(__all__)
