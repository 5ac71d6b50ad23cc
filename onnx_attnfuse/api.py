"""The calls for programs: `optimize`, `explain`, and the same as an onnx-ir pass."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import pathlib
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.fusion import model_passes
from onnx_attnfuse.fusion.pipeline import Fusion
from onnx_attnfuse.graph import io
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.language.registry.registry import BUILT_IN
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.grouping import last_line, table
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.transforms.decompose.decompose import UnfuseReport
from onnx_attnfuse.transforms.half_precision.convert import ConversionReport
from onnx_attnfuse.transforms.half_precision.options import Conversion
from onnx_attnfuse.verify.options import Trials
from onnx_attnfuse.verify.verdict import Verification
from onnx_attnfuse.verify.verifier import Verifier

_Reported = TypeVar("_Reported")


@dataclasses.dataclass(frozen=True)
class _Changed(Generic[_Reported]):
    """A model that was changed, and the report on it."""

    model: Any
    """The changed model, of the kind that was handed in: an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram`.

    For a path it is an `onnx_ir.Model`.
    """
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

    def __repr__(self) -> str:
        return f"<Result: {last_line(self.report, 'fused')}>"

    def _repr_html_(self) -> str:
        return table(self.report)


def optimize(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Result:
    """Fuses every attention of a model that can be fused exactly.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or what `torch.onnx.export(..., dynamo=True)` returns.
        options: Choices; or give its fields by name.
        **choices: Fields of `Options`.

    Returns:
        The fused model, of the same kind, and the report.

    Raises:
        ModelError: The model cannot be read, or not be captured where `cuda_graph` asks for it.
        OptionError: An option has no such value, or contradicts another.
        VerificationError: `verify="model"`, and the whole models differ.
    """
    fusion = Fusion(dataclasses.replace(options or Options(), **choices))
    loaded, kind = fusion.read(model)
    verifier = fusion.verifier
    before = _original(model, loaded, fusion.options) if verifier.level == "model" else None
    report = fusion.fuse(loaded)
    model_passes.refuse_uncaptured(report, fusion.options)
    if before is not None:
        # a decoder whose cache is shared has other inputs, and was verified in a loop; one without roundings, without any
        judged = report.decoder is not None or report.dequantised is not None
        own = [item.name for item in report.patterns if item.hits and item.owner != BUILT_IN]
        assumes = {name for site in report.sites if site.is_rewritten for name in site.assumptions}
        note = None if judged else verifier.check_model(before, loaded, own, assumes)
        notes = (*report.notes, note) if note else report.notes
        report = dataclasses.replace(report, notes=notes, steps=dict(verifier.timer.seconds))
    return Result(io.to_kind(loaded, kind), dataclasses.replace(report, model=_path(model)), loaded)


def _original(model: io.AnyModel, loaded: ir.Model, options: Options | None = None) -> str | ir.Model:
    """The model as it was, for comparison: its file, or a copy of what was loaded, with the sizes that are to be fixed."""
    if options is not None and model_passes.fixes(loaded, options):
        copy = loaded.clone()
        model_passes.fix(copy, options)
        return copy
    return _path(model) or loaded.clone()


def explain(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Report:
    """A report on all that `optimize` would do and refuse; nothing is written. Arguments and errors are those of `optimize`."""
    fusion = Fusion(dataclasses.replace(options or Options(), **choices), keep_evidence=False)
    return dataclasses.replace(fusion.fuse(fusion.read(model)[0]), model=_path(model))


def _path(model: io.AnyModel) -> str | None:
    """The path of a model that is read from a file."""
    return str(model) if isinstance(model, (str, pathlib.PurePath)) else None


class Unfused(_Changed[UnfuseReport]):
    """A model whose fused operators were decomposed, and the report on it."""


def unfuse(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Unfused:
    """Decomposes every fused attention and rotary embedding that can be decomposed exactly into operators of the standard.

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
    from onnx_attnfuse.transforms.decompose.decompose import Decomposer

    options = dataclasses.replace(options or Options(), **choices)
    verifier = Verifier(options)
    loaded, kind = io.from_any(model)
    before = _original(model, loaded) if verifier.level == "model" else None
    report = Decomposer(loaded, options, verifier).go()
    if before is not None:
        verifier.check_model(before, loaded)
    return Unfused(io.to_kind(loaded, kind), report, loaded)


def verify_models(first: io.AnyModel, second: io.AnyModel, trials: Trials | None = None, **choices: Any) -> Verification:
    """Runs two models of one interface on hostile inputs, chosen by what each input is, and compares every output.

    Args:
        first: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or an `ONNXProgram`; the reference.
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
    from onnx_attnfuse.verify.compare_models import verify_models

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
    from onnx_attnfuse.transforms.half_precision import convert as half_precision

    conversion = dataclasses.replace(conversion or Conversion(), **choices)
    loaded, kind = io.from_any(model)
    before = _original(model, loaded)
    report = half_precision.verified(before, loaded, conversion)
    return Converted(io.to_kind(loaded, kind), report, loaded)


class AttentionFusionPass(ir.passes.InPlacePass):
    """Attention fusion as an onnx-ir pass; the report of the last run is in `report`."""

    def __init__(self, options: Options | None = None, **choices: Any) -> None:
        super().__init__()
        self.options = dataclasses.replace(options or Options(), **choices)
        self.report: Report | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuses in place; `modified` tells whether anything was rewritten, or sizes were fixed."""
        self.report = Fusion(self.options).fuse(model)
        model_passes.refuse_uncaptured(self.report, self.options)
        counted = self.report.ops_before != self.report.ops_after
        changed = counted or any(site.is_rewritten for site in self.report.sites)
        return ir.passes.PassResult(model, modified=changed or self.options.cuda_graph)


_LOG = logging.getLogger(__name__)


def providers(result: Result | Report) -> list[str | tuple[str, dict[str, str]]]:
    """A session's `providers`: the execution provider that was planned for with its options, then the CPU's."""
    session = _session(result)
    if session.provider == "CPUExecutionProvider":
        return [session.provider]
    return [(session.provider, dict(session.provider_options)), "CPUExecutionProvider"]


def write_genai_config(
    result: Result | Report, model: str | os.PathLike[str], hf_config: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Writes genai_config.json beside a saved decoder with a shared cache, so that onnxruntime-genai runs the folder.

    Args:
        result: The result of `optimize(..., cache="shared")`.
        model: The file that the model was saved to.
        hf_config: config.json of the model on Hugging Face, which has the tokens that begin, end and pad.

    Returns:
        A line for each entry that is unknown, with its present value and the remedy.

    Raises:
        OptionError: The cache is as it was, onnxruntime-genai cannot run the model, the Hugging Face config cannot be used or
            contradicts the model, or the folder has a genai_config.json of another.
    """
    from onnx_attnfuse.serving import genai_config, hugging_face

    report = result.report if isinstance(result, Result) else result
    if report.decoder is None:
        raise OptionError("no cache of this model is a buffer; optimize with cache='shared', and see the notes of the report")
    config = None if hf_config is None else hugging_face.read_config(pathlib.Path(hf_config))
    planned = genai_config.plan(report.decoder, _session(result), pathlib.Path(model), config)
    planned.write()
    return planned.assumed


def session_environment(result: Result | Report) -> dict[str, str]:
    """Variables to put into `os.environ` before the session is made: settings that ONNX Runtime takes in no other way."""
    return dict(_session(result).environment)


def session_options(result: Result | Report) -> Any:
    """A session's `sess_options`: all of ONNX Runtime's own optimisations, which the fused model was made for.

    Returns:
        An `onnxruntime.SessionOptions`. Where `session_environment` asks for variables that are not set, the log has a warning.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    for name, value in session_environment(result).items():
        if os.environ.get(name) != value:
            _LOG.warning("%s=%s is not set, so ONNX Runtime may choose other kernels than predicted", name, value)
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
