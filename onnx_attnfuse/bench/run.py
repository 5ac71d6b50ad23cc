"""A benchmark of one model: as a whole, and its attention cut out, each a contest of its own."""

from __future__ import annotations

import dataclasses
import html
import pathlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import find_candidates
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.bench import compare
from onnx_attnfuse.bench.compare import ORIGINAL, OURS, Contender, Figures, check_names, contenders
from onnx_attnfuse.bench.process import Sample, fitting, sample
from onnx_attnfuse.bench.roofline import Limit, Work, limit, work
from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError
from onnx_attnfuse.fusion.model_options import check_options
from onnx_attnfuse.fusion.shared_cache.decoder import LENGTH, window_length
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.scopes import Scope, scopes
from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.kernels.gpus import DeviceLimits, limits_of
from onnx_attnfuse.kernels.providers import FALLBACK, provider
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.verify.compare_models import verify_models
from onnx_attnfuse.verify.options import Trials
from onnx_attnfuse.verify.runtime import INSTALL, available
from onnx_attnfuse.verify.subgraph import extract
from onnx_attnfuse.verify.submodel import Submodel
from onnx_attnfuse.verify.verdict import Verification

_WIDTH, _LEFT, _RIGHT, _ROW = 680, 130, 210, 26


@dataclasses.dataclass(frozen=True)
class Contest:
    """The results for a whole model, or for an attention of it."""

    what: str
    lengths: Mapping[str, int]
    """Numbers that symbolic sizes had."""
    figures: tuple[Figures, ...]
    fused: int
    """Sites that we fused, those included that were fused before."""
    candidates: int
    note: str | None = None
    """Why there are no figures."""
    work: Work | None = None
    """The least work of a run, counted in the model as we fuse it."""
    limit: Limit | None = None
    """The least time for that on the device; None where its limits are not known."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The results for two models of one interface."""

    lengths: Mapping[str, int]
    """Numbers that symbolic sizes had."""
    clock: str
    """The kind of the times: `CPU time on one thread`, or `time`."""
    figures: tuple[Figures, Figures]
    """The second model, whose ratio is to the first, and the first."""
    outputs: Verification | None
    """How far the outputs are apart; None where they could not be compared."""
    note: str | None = None
    """Why they could not."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """How a model is measured."""

    options: Options
    against: Sequence[str] = ("original",)
    """Other contenders; ratios are taken to the original, or else to the last that runs."""
    runs: int = 30
    seconds: float = 300.0
    """The time limits of each contender, to start and for a round."""

    def model(self, path: pathlib.Path) -> list[Contest]:
        """Measures a model, and the attention that it has most of.

        Raises:
            ModelError: The model cannot be read, or does not say what it is run on.
            OptionError: A contender does not exist, or the sizes do not fit together.
        """
        check_names(self.against)
        _check_runtime()
        model = io.load(path)
        whole = fitting(path, model, self.options.dim, self.ep, self.seconds)
        found = [self._contest("whole model", path, whole)]
        alone = cut_attention(model)
        if not isinstance(alone, Alone):
            return [*found, Contest("attention alone", {}, (), 0, 0, str(alone))]
        with tempfile.TemporaryDirectory() as folder:
            piece = pathlib.Path(folder) / "attention.onnx"
            io.save(io.from_any(alone.proto)[0], piece)
            title = f"attention alone: {alone.name}, one of {alone.alike}"
            plain = dataclasses.replace(self, options=dataclasses.replace(self.options, cache="as-is", kv_cache="same"))
            return [*found, plain._contest(title, piece, sample(io.load(piece), whole.lengths))]

    def pair(self, first: pathlib.Path, second: pathlib.Path) -> Pair:
        """Measures two models in turns on the same inputs, and compares their outputs.

        On the CPU the time is that of the process on one thread, which other programs on the machine disturb least.

        Raises:
            ModelError: A model cannot be read, or does not say what it is run on.
            OptionError: The sizes do not fit together, or the execution provider captures no model.
        """
        _check_runtime()
        check_options(self.options)
        io.load(second)
        inputs = fitting(first, io.load(first), self.options.dim, self.ep, self.seconds)
        on_cpu = provider(self.ep).memory == "cpu"
        how = {"threads": 1, "clock": "cpu"} if on_cpu else {}
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
        found = [Contender(names[1], second), Contender(names[0], first)]
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            late, early = self._run(found, inputs, place, how)
        outputs, note = None, None
        try:
            outputs = verify_models(first, second, Trials(dim=self.options.dim))
        except (ModelError, MissingDependencyError) as error:
            note = str(error)
        return Pair(inputs.lengths, "CPU time on one thread" if on_cpu else "time", (late, early), outputs, note)

    def gain(self, source: pathlib.Path, result: pathlib.Path, report: Report) -> str:
        """A line on how many times as fast a result is as its source, or on why it was not measured.

        Raises:
            MissingDependencyError: onnxruntime is absent.
            ModelError: The source does not say what it is run on.
            OptionError: The sizes do not fit together.
        """
        _check_runtime()
        inputs = fitting(source, io.load(source), self.options.dim, self.ep, self.seconds)
        found = [_in_one_buffer(Contender(OURS, result), report, inputs), Contender(ORIGINAL, source)]
        with tempfile.TemporaryDirectory() as folder:
            ours, other = self._run(found, inputs, pathlib.Path(folder))
        if ours.ratios is None or ours.ms is None or other.ms is None:
            return f"not measured: {ours.failed or other.failed}"
        sizes = ", ".join(f"{name}={number}" for name, number in inputs.lengths.items())
        low, high = ours.ratios
        said = f"{ours.ratio:.2f} times as fast ({low:.2f} to {high:.2f}), {ours.ms:.3f} ms instead of {other.ms:.3f}; {sizes}"
        late = [item.name for item in (ours, other) if item.uncaptured is not None]
        return f"{said}; not captured: {', '.join(late)}" if late else said

    @property
    def ep(self) -> str:
        """The execution provider that models are run on."""
        return FALLBACK if self.options.ep == "auto" else self.options.ep

    def _run(
        self, found: Sequence[Contender], inputs: Sample, folder: pathlib.Path, how: Mapping[str, Any] | None = None
    ) -> list[Figures]:
        captured = self.options.cuda_graph
        return compare.run(found, inputs, folder, ep=self.ep, runs=self.runs, seconds=self.seconds, how=how, captured=captured)

    def _fixed(self, inputs: Sample) -> Options:
        """The options with numbers for all sizes, where the model is to be captured.

        A captured step has a buffer that is as long as the mask, which is the longest of the inputs with a row for each entry.
        """
        if not self.options.cuda_graph:
            return self.options
        rows = (array.shape[1] for array in inputs.feeds.values() if array.ndim == 2)
        buffer = {LENGTH: max(rows, default=1)} if self.options.cache == "shared" else {}
        return dataclasses.replace(self.options, dim={**buffer, **inputs.lengths, **self.options.dim})

    def _contest(self, what: str, path: pathlib.Path, inputs: Sample) -> Contest:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            found, report = contenders(path, self.against, self._fixed(inputs), folder, self.seconds)
            if report.unshared is not None:
                raise OptionError(f"--cache shared was not applied: {report.unshared}")
            found[0] = _in_one_buffer(found[0], report, inputs)
            figures = self._run(found, inputs, folder)
            assert found[0].path is not None
            own = found[0].inputs or inputs
            done = work(io.load(found[0].path), {name: array.shape for name, array in own.feeds.items()})
        device = device_limits(self.ep)
        least = None if device is None else limit(done, device)
        if least is not None:
            figures = [dataclasses.replace(item, share=None if item.ms is None else least.ms / item.ms) for item in figures]
        fused = report.fused + report.already_fused
        return Contest(what, inputs.lengths, tuple(figures), fused, report.candidates, work=done, limit=least)


def _check_runtime() -> None:
    if not available():
        raise MissingDependencyError(f"measuring needs onnxruntime; {INSTALL}")


def _in_one_buffer(contender: Contender, report: Report, inputs: Sample) -> Contender:
    """A contender whose cache is shared, with a buffer for as many positions as its source has, past and new."""
    decoder = report.decoder
    if decoder is None or contender.path is None:
        return contender
    length = next((array.shape[-1] for name, array in inputs.feeds.items() if name == decoder.attention_mask), None)
    if length is None:
        raise ModelError("the source has no mask that gives the length of the cache; run the models in onnxruntime-genai instead")
    windows = {window_length(window): window for window in decoder.cache_windows if window is not None}
    own = sample(io.load(contender.path), {**inputs.lengths, **windows, LENGTH: length})
    presents, pasts = (*decoder.present_keys, *decoder.present_values), (*decoder.past_keys, *decoder.past_values)
    return dataclasses.replace(contender, inputs=own, buffers=dict(zip(presents, pasts, strict=True)))


def device_limits(ep: str) -> DeviceLimits | None:
    """The limits of the device that an execution provider runs on here; None where they are not known."""
    found = gpus.installed() if provider(ep).memory == "cuda" else ()
    return limits_of(found[0].name) if found else None


@dataclasses.dataclass(frozen=True)
class Alone:
    """An attention that was cut out."""

    name: str
    """The site's name."""
    alike: int
    """How many sites have the same sizes, type and kind of operators."""
    proto: onnx.ModelProto


def cut_attention(model: ir.Model) -> Alone | Reason:
    """The attention that the model has most of, cut out; or why it cannot be."""
    readers = load(Options()).readers
    found: dict[object, list[tuple[Scope, AttentionSpec]]] = {}
    for scope in scopes(model):
        for candidate in find_candidates(scope, readers, keep_outputs=True):
            if candidate.spec is not None:
                found.setdefault(_kind(candidate.spec, scope), []).append((scope, candidate.spec))
    if not found:
        return Reason("no-attention", "no attention in the model could be read")
    most = max(found.values(), key=len)
    scope, spec = most[0]
    try:
        return Alone(spec.name, len(most), _standalone(spec, scope, model))
    except Refused as refused:
        return refused.reason


def _kind(spec: AttentionSpec, scope: Scope) -> object:
    dims = [str(scope.facts.dims(operand[-1].indexed.value)) for operand in spec.operands()]
    return spec.dtype, not spec.mask, *dims, tuple(sorted(Counter(node.op_type for node in spec.nodes).items()))


def _standalone(spec: AttentionSpec, scope: Scope, model: ir.Model) -> onnx.ModelProto:
    """The model, its inputs with the symbolic sizes that they have in the source.

    Raises:
        Refused: It cannot be cut out.
    """
    frontier = [operand[-1].indexed.value for operand in spec.operands()]
    piece = extract((spec.output[-1].value,), frontier, scope.facts)
    opsets = scope.graph.opset_imports or model.opset_imports
    proto = Submodel(piece, opsets, model.functions, widened=False).proto
    for item, entry in zip(piece.inputs, proto.graph.input, strict=True):
        for dim, size in zip(entry.type.tensor_type.shape.dim, item.dims, strict=True):
            if not isinstance(size, int):
                dim.dim_param = str(size)
    return proto


def picture(contests: Sequence[Contest]) -> str:
    """The picture of all contests that have figures, each to a scale of its own.

    Args:
        contests: The results for a model.

    Returns:
        A document that needs nothing else.
    """
    parts: list[str] = []
    top = 0
    for contest in contests:
        sizes = ", ".join(f"{name}={number}" for name, number in contest.lengths.items())
        title = html.escape(f"{contest.what} ({sizes})" if sizes else contest.what)
        parts.append(f'<text x="8" y="{top + 18}" font-weight="bold">{title}</text>')
        top += _ROW
        longest = max((item.ms for item in contest.figures if item.ms is not None), default=1.0)
        for item in contest.figures:
            parts += _bar(item, top, longest)
            top += _ROW
    style = 'font-family="sans-serif" font-size="13" fill="#1b2028"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 8}" {style}>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{top + 8}" fill="#fff"/>', *parts, "</svg>", ""])


def _bar(item: Figures, top: int, longest: float) -> Iterator[str]:
    """The name, the bar and the numbers of a contender."""
    width = 0.0 if item.ms is None else (_WIDTH - _LEFT - _RIGHT) * item.ms / longest
    said = "failed" if item.ms is None or item.ratio is None else f"{item.ms:.3g} ms, {item.ratio:.2f} times as fast"
    yield f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{html.escape(item.name)}</text>'
    yield f'<rect x="{_LEFT}" y="{top + 4}" width="{width:.1f}" height="18" rx="3" fill="#3451c6"/>'
    yield f'<text x="{_LEFT + width + 8:.1f}" y="{top + 17}">{said}</text>'
