"""The steps from a model to a fused model and its report, in order."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnx_attnfuse.axes.factors import leaves, length
from onnx_attnfuse.devices import resolve
from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.scopes import Scope, all_names, count_ops, scopes
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.meaning import understand
from onnx_attnfuse.masks.reader import Reader
from onnx_attnfuse.match.finder import Candidate, anchor_of, find_candidates, read_candidate
from onnx_attnfuse.match.registry import load_packs
from onnx_attnfuse.options import Options
from onnx_attnfuse.plan import make_plan
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.report.model import Report, SiteReport, Status, Verified
from onnx_attnfuse.rewrite import check_shape_users, commit, undo
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets.emitted import Emitted, Workbench
from onnx_attnfuse.targets.placing import place

if TYPE_CHECKING:
    from onnx_attnfuse.verify.judge import Judge

_CONTRIB = "com.microsoft"


class Run:
    """One pass over one model."""

    def __init__(self, model: ir.Model, options: Options) -> None:
        self.model = model
        self.options = options
        self.device = resolve(options.ep)
        self.judge = _judge(options)
        self.names = all_names(model)
        self.sites: list[SiteReport] = []
        self.differing = 0
        self.notes: list[str] = []
        self.replaced: set[ir.Value] = set()

    def go(self) -> Report:
        """Fuses what can be fused, in place."""
        load_packs()
        start = time.perf_counter()
        before = count_ops(self.model)
        work = [(scope, find_candidates(scope, self.options.keep_outputs)) for scope in scopes(self.model)]
        total, done = sum(len(candidates) for _, candidates in work), 0
        for scope, candidates in work:
            builder = Builder(scope.graph, scope.facts, scope.opset, self.names)
            bench = Workbench(builder, Bounds(scope.facts), Reader(scope.facts), self.device)
            for candidate in candidates:
                self.options.progress("fusing", done, total)
                self.sites.append(self._site(candidate, scope, bench))
                done += 1
        if any(site.status == "fused" for site in self.sites):
            self._import_contrib()
        seconds = time.perf_counter() - start
        return Report(tuple(self.sites), seconds, before, count_ops(self.model), tuple(self.notes), self.differing)

    def _site(self, candidate: Candidate, scope: Scope, bench: Workbench) -> SiteReport:
        if candidate.spec is not None and not self.replaced.isdisjoint(candidate.spec.values()):
            candidate = read_candidate(candidate.node, candidate.softmax, scope, self.options.keep_outputs)
        found = _unfused(candidate, scope)
        spec = candidate.spec
        if spec is None:
            return found
        meaning = understand(spec, bench.reader)
        found = dataclasses.replace(found, mask=meaning.kind)
        plan = make_plan(spec)
        if plan.target is None:
            return dataclasses.replace(found, reasons=plan.refusals)
        builder = bench.builder
        builder.at(anchor_of(spec))
        try:
            check_shape_users(spec, builder)
            emitted = plan.target.emit(spec, meaning, bench)
            verified = self._verified(spec, emitted, scope)
        except Refused as refused:
            undo(builder)
            return dataclasses.replace(found, reasons=(refused.reason,))
        commit(spec, emitted, builder)
        self.replaced.add(emitted.replaced)
        return dataclasses.replace(
            found,
            status="fused",
            op=plan.target.OP,
            domain=plan.target.DOMAIN,
            scale=None if spec.scale_values else emitted.scale,
            mask_form=emitted.mask,
            layout=emitted.layouts,
            verified=verified,
        )

    def _verified(self, spec: AttentionSpec, emitted: Emitted, scope: Scope) -> Verified | None:
        if self.judge is None:
            return None
        stops = [operand[-1].laid.value for operand in spec.operands()]
        verdict = self.judge.judge(emitted.replaced, emitted.value, stops, scope.facts, self.model.opset_imports)
        if not verdict.equal:
            self.differing += 1
            raise Refused("differs", verdict.detail)
        return Verified(verdict.max_abs_error, verdict.cases)

    def _import_contrib(self) -> None:
        self.model.opset_imports.setdefault(_CONTRIB, 1)
        for function in self.model.functions.values():
            if any(node.domain == _CONTRIB for node in function.all_nodes()):
                function.opset_imports.setdefault(_CONTRIB, 1)


def _judge(options: Options) -> Judge | None:
    if judging(options) == "none":
        return None
    from onnx_attnfuse.verify.judge import Judge

    return Judge()


def _unfused(candidate: Candidate, scope: Scope) -> SiteReport:
    """The report on a site as it is before anything is done."""
    node, spec, refusal = candidate.node, candidate.spec, candidate.refusal
    found = SiteReport(node.name or node.outputs[0].name or "", scope.path, "skipped")
    if candidate.softmax is None:
        heads = attribute(node, "num_heads", attribute(node, "q_num_heads"))
        kv_heads = attribute(node, "kv_num_heads", heads)
        status: Status = "already-fused"
        found = dataclasses.replace(
            found, status=status, op=node.op_type, domain=node.domain, num_heads=heads, kv_num_heads=kv_heads
        )
    if refusal is not None:
        status = "not-attention" if refusal.code == "not-attention" else found.status
        return dataclasses.replace(found, status=status, reasons=(refusal,))
    if spec is None:
        return found
    axes = place(spec)
    present = {leaf for axis in spec.key[-1].laid.axes for leaf in leaves(axis)}
    kv_axis = tuple(leaf for leaf in axes.n if leaf in present)
    sizes = [length(axis) for axis in (axes.n, kv_axis, axes.h, axes.v)]
    known = [size if isinstance(size, int) else None for size in sizes]
    return dataclasses.replace(found, num_heads=known[0], kv_num_heads=known[1], head_size=known[2], v_head_size=known[3])


def judging(options: Options) -> str:
    """How rewrites are judged under `options`.

    Raises:
        MissingDependencyError: Judging was asked for and onnxruntime is absent.
        OptionError: The choice does not exist.
    """
    available = importlib.util.find_spec("onnxruntime") is not None
    if options.verify is None:
        return "sites" if available else "none"
    if options.verify not in {"none", "sites", "model"}:
        raise OptionError(f"verify is {options.verify!r}; choose none, sites or model")
    if options.verify != "none" and not available:
        raise MissingDependencyError(
            "verification needs onnxruntime; run pip install 'onnx-attnfuse[cpu]', or pass --verify none"
        )
    return options.verify


@dataclasses.dataclass(frozen=True)
class Result:
    """A fused model and the report on it."""

    model: Any
    """What was handed in: an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram`; for a path an `onnx_ir.Model`."""
    report: Report
    _ir: ir.Model = dataclasses.field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model; weights in other files stay there.

        Args:
            path: Where to; never the file the model came from.

        Raises:
            OptionError: The path is the input's.
            ModelError: The file cannot be written.
        """
        io.save(self._ir, path)


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
    """
    options = dataclasses.replace(options or Options(), **choices)
    loaded, kind = io.from_any(model)
    report = Run(loaded, options).go()
    return Result(io.to_kind(loaded, kind), report, loaded)


def explain(model: io.AnyModel, options: Options | None = None, **choices: Any) -> Report:
    """What `optimize` would do and refuse, on a copy; see there for arguments and errors."""
    return optimize(model, options, **choices).report


class AttentionFusionPass(ir.passes.InPlacePass):
    """The same as an onnx-ir pass; the report of the last run is in `report`."""

    def __init__(self, options: Options | None = None, **choices: Any) -> None:
        super().__init__()
        self.options = dataclasses.replace(options or Options(), **choices)
        self.report: Report | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuses in place; `modified` tells whether anything was fused."""
        self.report = Run(model, self.options).go()
        return ir.passes.PassResult(model, modified=self.report.fused > 0)
