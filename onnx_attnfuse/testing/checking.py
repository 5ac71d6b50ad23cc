"""Checking patterns against a model: their matches, and else the attempt that came nearest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from onnx_attnfuse.fusion.pipeline import Fusion
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.language.matcher.near_miss import Miss, Trace
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.testing.models import Model, as_model


@dataclasses.dataclass(frozen=True)
class Checked:
    """A model looked at by patterns."""

    report: Report
    misses: Mapping[str, Miss]
    """By the name of the Softmax, the attempt of one of the patterns at it that came furthest and failed."""
    nearest: Miss | None
    """Of attempts that met no Softmax."""


def check(model: Model, *patterns: object, inputs: Sequence[Any] | None = None, **options: Any) -> Checked:
    """Looks at a model by patterns; nothing is written.

    Args:
        model: A torch function or module, ONNX text, a path, or a model object.
        *patterns: The patterns, or files of them.
        inputs: Example inputs of a torch function or module.
        **options: Fields of `onnx_attnfuse.Options`.

    Raises:
        ModelError: The model cannot be read.
        OptionError: A pattern cannot be used.
    """
    fusion = Fusion(dataclasses.replace(Options(patterns=patterns), **options), keep_evidence=False)
    trace = Trace({entry.name for entry in fusion.catalogue.entries if not entry.owner.startswith("pack ")})
    report = fusion.fuse(as_model(model, inputs).clone(), trace=trace)
    misses = {label(node): miss for node, miss in trace.nearest.items() if node is not None}
    return Checked(report, misses, trace.nearest.get(None))
