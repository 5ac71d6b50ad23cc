"""Models that ONNX Runtime captures, as `cuda_graph` asks for: sizes are fixed, and remaining blockers reported or refused."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.fusion.pass_context import Run
from onnx_attnfuse.graph import fixed_sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.fixed_sizes import fold_sizes, input_sizes, inputs_without_shape, unknown_sizes
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.capture import capture_blockers
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import CaptureReport, Report
from onnx_attnfuse.serving.decoder import ServedDecoder, StepSizes
from onnx_attnfuse.targets import packed


def check_options(options: Options) -> None:
    """Checks that a model can be captured with these options at all, if that is asked for.

    Raises:
        OptionError: The execution provider captures no model, or another option prevents a capture.
    """
    is_packed = options.target == packed.NAME
    if options.packed_tokens is not None and not (options.cuda_graph and is_packed):
        raise OptionError(
            f"packed_tokens is given, which is for cuda_graph with target {packed.NAME!r}; add both or leave it out"
        )
    if not options.cuda_graph:
        return
    ep = resolve(options.ep, options.arch).ep
    if providers.provider(ep).capture is None:
        others = " or ".join(item.name for item in providers.every() if item.capture is not None)
        raise OptionError(f"cuda_graph is asked for, and {ep} captures no model; choose --ep {others} with it")
    if options.padding == "guarded":
        raise OptionError("padding is 'guarded', a test at run time, which no CUDA graph has; leave it or cuda_graph out")
    if is_packed and options.packed_tokens is None:
        problem = f"target is {packed.NAME!r}, and a CUDA graph has a fixed number of rows"
        raise OptionError(f"{problem}; add --packed-tokens N, for the most tokens of a batch, or leave cuda_graph out")


def fixes(model: ir.Model, options: Options) -> bool:
    """Whether a model's sizes are to be fixed: for a capture, or as the provider takes numbers only and all are given."""
    if options.cuda_graph:
        return True
    names = set(input_sizes(model))
    are_given = bool(names) and names <= options.dim.keys() and not inputs_without_shape(model)
    return are_given and resolve(options.ep, options.arch).provider.fixed_sizes


def fix(model: ir.Model, options: Options) -> None:
    """Fixes the sizes of a model's inputs, in place.

    Raises:
        ModelError: An input does not say how many axes it has.
        OptionError: Sizes are not given, or given for nothing.
    """
    names = input_sizes(model)
    if missing := [name for name in names if name not in options.dim]:
        asked = " ".join(f"--dim {name}=N" for name in missing)
        raise OptionError(f"cuda_graph needs numbers for the sizes {', '.join(map(repr, missing))}; add {asked}")
    fixed_sizes.fix_sizes(model, options.dim, options.assumed)


def sized(decoder: ServedDecoder, model: ir.Model) -> ServedDecoder:
    """A decoder with the sizes that its model has been fixed to."""
    shapes = {value.name: value.shape or ir.Shape(()) for value in model.graph.inputs}
    batch, new = (shapes[decoder.input_ids or decoder.inputs_embeds or ""][axis] for axis in (0, 1))
    found = (batch, new, shapes[decoder.attention_mask][1], shapes[decoder.past_keys[0]][2])
    return dataclasses.replace(decoder, sizes=StepSizes(*(size for size in found if isinstance(size, int))))


def fix_sizes(run: Run) -> int:
    """Fixes sizes where that is asked for; a shared cache gets dimensions of its own, so that its sizes are fixed later."""
    if run.options.cache == "shared":
        return 0
    run.notes += _untaken(run.model, run.options)
    if not fixes(run.model, run.options):
        return 0
    fix(run.model, run.options)
    return 1


def _untaken(model: ir.Model, options: Options) -> Iterator[str]:
    """A line on dimensions that `--dim` or `--same` names and no input has."""
    names = input_sizes(model)
    there = ", ".join(names) or "none"
    if unknown := unknown_sizes(model, options.dim):
        yield f"--dim {', '.join(unknown)} matches no dimension; the inputs have {there}"
    for same in options.same:
        if unmatched := [name for name in same.split("=") if not fnmatch.filter(names, name)]:
            yield f"--same {', '.join(unmatched)} matches no dimension; the inputs have {there}"


def fold_fixed_sizes(run: Run) -> int:
    """Makes constants of values that follow from fixed sizes."""
    options, provider = run.options, run.plan_context.device.provider
    if not (options.cuda_graph or (provider.fixed_sizes and not input_sizes(run.model))):
        return 0
    if options.cache == "shared":
        fix(run.model, options)
    return fold_sizes(run.model, options.assumed)


def tell_capture(run: Run) -> int:
    """Takes down whether the model can be captured; changes nothing."""
    folded, known = run.options.cuda_graph, {part.scope.graph: part.scope.facts for part in run.graphs}
    stale = folded or run.kv_cache is not None
    run.capture = report_capture(run.model, run.plan_context.device.provider, folded=folded, known=None if stale else known)
    return 0


def report_capture(
    model: ir.Model, provider: ExecutionProvider, *, folded: bool, known: Mapping[ir.Graph, Facts] | None = None
) -> CaptureReport | None:
    """Whether a model can be captured, None where the execution provider captures none; arguments are those of the search."""
    capture = provider.capture
    if capture is None:
        return None
    unknown = (Reason("open-size", f"the input '{name}' has no shape") for name in inputs_without_shape(model))
    blockers = (*unknown, *capture_blockers(model, capture, folded=folded, known=known))
    return CaptureReport(capture.name, not blockers, input_sizes(model), blockers)


def refuse_uncaptured(report: Report, options: Options) -> None:
    """Refuses a model that is to be captured and cannot be.

    Raises:
        ModelError: Something prevents it, or it is not known.
    """
    if not options.cuda_graph or (report.capture is not None and report.capture.possible):
        return
    why = "it is not known whether it can be" if report.capture is None else str(report.capture.blockers[0])
    raise ModelError(f"the model cannot be captured in a CUDA graph: {why}; leave --cuda-graph out, or change that in its source")
