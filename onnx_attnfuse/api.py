"""What a program calls: `optimize`, `explain`, and the same as an onnx-ir pass."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from onnx_attnfuse.catalogue.packs import load
from onnx_attnfuse.converting.options import Conversion
from onnx_attnfuse.converting.report import ConversionReport
from onnx_attnfuse.court import Court
from onnx_attnfuse.graph import io
from onnx_attnfuse.options import Options
from onnx_attnfuse.pipeline import Run
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.unfusing.report import UnfuseReport
from onnx_attnfuse.verify.trials import Trials
from onnx_attnfuse.verify.verification import Verification

_Reported = TypeVar("_Reported")


@dataclasses.dataclass(frozen=True)
class _Changed(Generic[_Reported]):
    """A model that was changed, and the report on it."""

    model: Any
    """What was handed in: an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram`; for a path an `onnx_ir.Model`."""
    report: _Reported
    _ir: ir.Model = dataclasses.field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
        """Writes the model; weights in data files stay there, and are copied where the model goes to another folder.

        Args:
            path: Where to; never the file the model came from.

        Returns:
            The data files that were there before and that the new file needs beside it; they outlive the source.

        Raises:
            OptionError: The path is the input's, or the disk has no room for the weights.
            ModelError: The file cannot be written.
        """
        return io.save(self._ir, path)


class Result(_Changed[Report]):
    """A fused model and the report on it."""


def optimize(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Result:
    """Fuses every attention of a model that can be fused exactly.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or what `torch.onnx.export(..., dynamo=True)` returns.
        options: Choices; or give its fields by name.
        **choices: Fields of `Options`.

    Returns:
        The fused model, of the same kind, and the report.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An option has no such value.
        VerificationError: `verify="model"`, and the whole models differ.
    """
    options = dataclasses.replace(options or Options(), **choices)
    catalogue = load(options)
    court = Court(options, catalogue.operators.values())
    with court.clock.step("read"):
        loaded, kind = io.from_any(model)
    before = _original(model, loaded) if court.level == "model" else None
    report = Run(loaded, options, court, catalogue).go()
    if before is not None:
        note = court.model(before, loaded)
        notes = (*report.notes, note) if note else report.notes
        report = dataclasses.replace(report, notes=notes, steps=dict(court.clock.seconds))
    return Result(io.to_kind(loaded, kind), report, loaded)


def _original(model: io.AnyModel, loaded: ir.Model) -> str | ir.Model:
    """The model as it was, for comparison: its file, or a copy of what was loaded."""
    return str(model) if isinstance(model, (str, pathlib.PurePath)) else loaded.clone()


def explain(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Report:
    """What `optimize` would do and refuse; nothing is written. See there for arguments and errors."""
    options = dataclasses.replace(options or Options(), **choices)
    catalogue = load(options)
    court = Court(options, catalogue.operators.values(), keep_evidence=False)
    with court.clock.step("read"):
        loaded, _ = io.from_any(model)
    return Run(loaded, options, court, catalogue).go()


class Unfused(_Changed[UnfuseReport]):
    """A model whose fused operators were spelled out, and the report on it."""


def unfuse(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Unfused:
    """Spells out every fused attention and rotary embedding that can be spelled out exactly, in operators of the standard.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or what `torch.onnx.export(..., dynamo=True)` returns.
        options: Choices, of which `ep`, `verify`, `evidence` and `progress` count; or give these by name.
        **choices: Fields of `Options`.

    Returns:
        The model in operators of the standard, of the same kind, and the report.

    Raises:
        ModelError: The model cannot be read.
        OptionError: An option has no such value.
        VerificationError: `verify="model"`, and the whole models differ.
    """
    from onnx_attnfuse.unfusing.run import Unfusing

    options = dataclasses.replace(options or Options(), **choices)
    court = Court(options)
    loaded, kind = io.from_any(model)
    before = _original(model, loaded) if court.level == "model" else None
    report = Unfusing(loaded, options, court).go()
    if before is not None:
        court.model(before, loaded)
    return Unfused(io.to_kind(loaded, kind), report, loaded)


def verify_models(first: io.AnyModel, second: io.AnyModel, trials: Trials | None = None, **choices: Any) -> Verification:
    """Runs two models of one interface on hostile inputs, chosen by what each input is, and compares every output.

    Args:
        first: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or an `ONNXProgram`; what counts as right.
        second: The same; its float inputs and outputs may be of other float types.
        trials: Choices; or give its fields by name.
        **choices: Fields of `Trials`.

    Returns:
        Whether they are equal, the errors of every output, NaN apart, and the first inner value in which they differ.

    Raises:
        MissingDependencyError: onnxruntime is absent.
        ModelError: A model cannot be read or run, or the two have other inputs or outputs.
        OptionError: A dimension is named that no input has.
    """
    from onnx_attnfuse.verify.model import verify_models

    return verify_models(_source(first), _source(second), dataclasses.replace(trials or Trials(), **choices))


def _source(model: io.AnyModel) -> Any:
    """A file, a proto or an `onnx_ir.Model`; of an `ONNXProgram` its model."""
    return inner if isinstance(inner := getattr(model, "model", None), ir.Model) else model


class Converted(_Changed[ConversionReport]):
    """A model in a half type, and the report on it; weights are rounded one at a time, when it is saved."""


def convert(model: io.AnyModel, conversion: Conversion | None = None, **choices: Any) -> Converted:
    """Converts float32 to a half type, but for what masks, sums and divides.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or what `torch.onnx.export(..., dynamo=True)` returns.
        conversion: Choices; or give its fields by name.
        **choices: Fields of `Conversion`.

    Returns:
        The model, of the same kind, and the report. Weights in data files are read when the model is written.

    Raises:
        MissingDependencyError: `verify="model"`, and onnxruntime is absent.
        ModelError: The model cannot be read, or nothing in it is float32.
        OptionError: An option has no such value, or the opset of the model lacks the type.
        VerificationError: The result differs from the model.
    """
    from onnx_attnfuse.converting import run

    conversion = dataclasses.replace(conversion or Conversion(), **choices)
    loaded, kind = io.from_any(model)
    before = _original(model, loaded)
    report = run.verified(before, loaded, conversion)
    return Converted(io.to_kind(loaded, kind), report, loaded)


class AttentionFusionPass(ir.passes.InPlacePass):
    """The same as an onnx-ir pass; the report of the last run is in `report`."""

    def __init__(self, options: Options | None = None, **choices: Any) -> None:
        super().__init__()
        self.options = dataclasses.replace(options or Options(), **choices)
        self.report: Report | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuses in place; `modified` tells whether anything was fused."""
        catalogue = load(self.options)
        court = Court(self.options, catalogue.operators.values())
        self.report = Run(model, self.options, court, catalogue).go()
        return ir.passes.PassResult(model, modified=self.report.fused > 0)
