"""The pipeline from a model to a fused model and its report: `PASSES` in order, each timed, contained and undone where it fails.

fusion = Fusion(options)
model, kind = fusion.read("model.onnx")
report = fusion.fuse(model)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.containment import Subject, collecting, contained, tell
from onnx_attnfuse.fusion import capturing, decoders, dequantising, passes, quantising, report_run
from onnx_attnfuse.fusion.enabling import AFTER, BEFORE
from onnx_attnfuse.fusion.pass_context import ModelPass, Pass, PassContext, Run
from onnx_attnfuse.graph import faults, io
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.language.matcher.match_state import Trace
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.verify.verifier import Verifier

_FIND, _REWRITE = "find", "plan and rewrite"
PASSES: tuple[Pass, ...] = (
    ModelPass("fixing sizes", capturing.fix_sizes, must_succeed=True),
    ModelPass("giving functions their constants", passes.embed_arguments, _FIND),
    ModelPass("decomposing operators with a past", decoders.decompose_cached, must_succeed=True),
    ModelPass("taking the decoder with a past of two", decoders.take_with_past),
    ModelPass(report_run.LAYING_OUT, decoders.lay_out),
    Pass("decomposing operators of other providers", passes.decompose_foreign, _REWRITE),
    Pass("removing no-op nodes", passes.drop_needless, _FIND),
    Pass("applying patterns", passes.apply_patterns, "apply patterns"),
    Pass("decomposing operators on quantised numbers", passes.decompose_quantised, _FIND),
    Pass("widening caches", passes.widen_rotary_caches, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("leaving roundings inside of attentions out", passes.leave_roundings_out, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("moving roundings", passes.move_roundings, _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    Pass("reading scores in normal form", passes.normalize_scores, _FIND),
    Pass("preparing for fusions of ONNX Runtime", functools.partial(passes.enable, BEFORE), _FIND),
    Pass("looking for attention", passes.find_attention, _FIND, None),
    ModelPass("switching kernels off", passes.switch_kernels),
    Pass("drawing sites", passes.draw, undo=None),
    Pass("sharing the buffer of the cache", decoders.share_cache, _REWRITE),
    Pass(report_run.PACKING_ROWS, passes.pack_rows, _REWRITE),
    Pass("packing the attentions of a graph", passes.pack_attention, _REWRITE),
    Pass(passes.FUSING, passes.fuse_attention, _REWRITE),
    Pass("putting patterns back", passes.put_patterns_back, _REWRITE, PassContext.to_origin),
    Pass("putting roundings back", passes.put_roundings_back, _REWRITE, None),
    Pass("putting operators on quantised numbers back", passes.put_quantised_back, _REWRITE, PassContext.to_origin),
    Pass("telling of sites", passes.tell_sites, _REWRITE, None),
    Pass("fusing other sequence mixers", passes.fuse_mixers, _REWRITE),
    Pass(report_run.ROTARY, passes.fuse_standalone_rotary, _REWRITE),
    Pass("folding constants", passes.fold_weights, _REWRITE),
    Pass("preparing for fusions of ONNX Runtime", functools.partial(passes.enable, AFTER), _REWRITE),
    Pass("keeping biases apart from products", passes.keep_biases_apart, _REWRITE),
    Pass("moving what only some batches need", passes.sink_into_branches, _REWRITE),
    Pass("writing nodes that the provider computes wrong otherwise", passes.avoid_quirks, _REWRITE),
    Pass("sorting nodes", passes.sort_nodes, _REWRITE),
    ModelPass("moving unused inputs to the end", passes.order_inputs),
    ModelPass("finishing opset imports", passes.finish_imports),
    ModelPass("judging the decoder", decoders.check, must_succeed=True),
    ModelPass("quantising the cache", quantising.quantise, must_succeed=True),
    ModelPass("measuring what roundings cost", dequantising.measure, must_succeed=True),
    ModelPass("folding fixed sizes", capturing.fold_fixed_sizes, _REWRITE, must_succeed=True),
    ModelPass("finishing the decoder", decoders.finish, must_succeed=True),
    ModelPass("telling what was done", report_run.tell_what_was_done),
    ModelPass("telling what can be captured", capturing.tell_capture),
)
"""All that is done to a model, in order."""


class Fusion:
    """A run that is set up: patterns are loaded and options are checked."""

    def __init__(self, options: Options, *, keep_evidence: bool = True, doubts: bool = True) -> None:
        """Sets a run up.

        Args:
            options: The options.
            keep_evidence: Write down differences.
            doubts: Verify rewrites of patterns that are not built in, whatever the options say.

        Raises:
            MissingDependencyError: Verification was asked for and onnxruntime is absent.
            OptionError: An option has no such value.
        """
        decoders.check_options(options)
        quantising.check_options(options)
        capturing.check_options(options)
        self.options = options
        self.catalogue = load(options)
        self.verifier = Verifier(options, self.catalogue.operators.values(), keep_evidence=keep_evidence, doubts=doubts)

    def read(self, model: io.AnyModel) -> tuple[ir.Model, io.ModelKind]:
        """Reads a model; see `io.from_any`."""
        with self.verifier.timer.step("read"):
            return io.from_any(model)

    @aside()
    def fuse(self, model: ir.Model, *, trace: Trace | None = None, dtype: ir.DataType | None = None) -> Report:
        """Fuses the model in place; a failure costs its own site, and is reported.

        Args:
            model: The model.
            trace: Takes the attempts of patterns that came nearest.
            dtype: Plan as if attention was computed in this type; the built nodes are of no use then.

        Raises:
            ModelError: The model is to be captured, and an input does not say how many axes it has.
            OptionError: The model is to be captured, and sizes of its inputs are not given.
            VerificationError: The whole model is to be judged, and differs.
        """
        fixed = self.options, self.catalogue, self.verifier, trace, dtype
        with collecting() as failures:
            for pack in self.catalogue.broken:
                tell(pack)
            run = _applied(Run(model, *fixed))
            if run.model is not model and run.shared.decoder is None:
                run = _applied(Run(model, *fixed, tried=run))
        model.graph = run.model.graph
        return report_run.report(run, failures.all())


def _applied(run: Run) -> Run:
    """The run, once all passes are applied: those on graphs all up to one on the model to a graph, then to the next graph."""
    for kind, stage in itertools.groupby(PASSES, key=type):
        together = tuple(stage)
        for subject in (run,) if kind is ModelPass else run.graphs or _read(run):
            for item in together:
                _apply(item, subject)
    return run


def _read(run: Run) -> Iterator[PassContext]:
    """The graphs of the model, each read when its turn comes, as passes may have changed its callers and surroundings."""
    run.take_model()
    pending = scopes(run.model, run.options.assumed)
    while True:
        with run.verifier.timer.step(_FIND):
            scope = next(pending, None)
            if scope is None:
                return
            faults.note_types(run.model, scope.graph, scope.facts.dtype)
            run.graphs.append(PassContext(run, scope))
        yield run.graphs[-1]


def _apply(item: Pass, subject: PassContext | Run) -> None:
    """Applies one pass; a failure is undone and reported."""
    run, place = (subject, None) if isinstance(subject, Run) else (subject.run, subject.scope.path)
    with contextlib.nullcontext() if item.step is None else run.verifier.timer.step(item.step):
        attempt = None if item.must_succeed else contained(Subject(item.name), place, item.undo and item.undo(subject))
        with attempt or contextlib.nullcontext():
            changes = item.apply(subject)
            run.changes[item.name] += changes
            run.version += bool(changes)
    subject.failure = (attempt and attempt.reason) or subject.failure
