"""One captured graph rewritten: read, planned and replaced site by site, with a report; graphs inside of checkpoints too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from onnx_attnfuse.attention.spec import AttentionSpec, mask_values
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.pytorch.decomposed_mha import open_calls
from onnx_attnfuse.training.pytorch.emitter import APART
from onnx_attnfuse.training.pytorch.gradients import Gradients
from onnx_attnfuse.training.pytorch.plan import CallPlan, Planner, Wishes
from onnx_attnfuse.training.pytorch.rewrite import Rewriter
from onnx_attnfuse.training.pytorch.sites import CapturedSite, Reading, SiteReader
from onnx_attnfuse.training.pytorch.trace import Constants, Traced, trace
from onnx_attnfuse.training.report import TrainingSiteReport

_FUSING = Subject("fusing an attention")


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The outcome of rewriting a captured graph."""

    sites: tuple[TrainingSiteReport, ...]
    relied: frozenset[int]
    """The ids of fake tensors of buffers whose contents the rewriting rests on."""


@aside()
def rewrite_graph(
    module: fx.GraphModule,
    inputs: list[Any],
    mode: FakeTensorMode,
    constants: Constants,
    wishes: Wishes,
    gradients: Gradients | None = None,
) -> Rewritten:
    """Replaces every attention of a captured graph that a call computes exactly, in place.

    Args:
        module: The graph.
        inputs: Fake tensors, and numbers, for its placeholders.
        mode: The mode that the fake tensors belong to.
        constants: The contents of buffers among the inputs.
        wishes: The caller's requirements on the calls.
        gradients: Which of the inputs gradients reach; None: those that ask for one.
    """
    open_calls(module, mode)
    traced = trace(module, inputs, mode, constants, gradients)
    reader = SiteReader(traced, wishes.patterns)
    run = _Run(traced, reader, wishes, Rewriter(traced, reader.facts, compiled=wishes.compiled))
    sites = [run.site(reading) for reading in list(reader.read())]
    relied = set(run.relied)
    module.graph.lint()
    module.recompile()
    for inner in traced.nested:
        found = rewrite_graph(inner.module, inner.inputs, mode, constants, wishes, inner.gradients)
        sites += found.sites
        relied |= found.relied
    return Rewritten(tuple(sites), frozenset(relied))


class _Run:
    """The sites of one graph in turn."""

    def __init__(self, traced: Traced, reader: SiteReader, wishes: Wishes, rewriter: Rewriter) -> None:
        self._traced, self._reader, self._wishes, self._rewriter = traced, reader, wishes, rewriter
        self.relied: set[int] = set()

    def site(self, reading: Reading) -> TrainingSiteReport:
        """One attention: replaced, or left with the reason."""
        site, report = reading.site, reading.report
        if site is None:
            return report
        with contained(_FUSING, site.spec.name) as attempt:
            planner = Planner(self._device(site), self._wishes, self._reader.reader, self._reader.bounds)
            plan = self._replaced(planner, site)
            if plan.is_new:
                self.relied.update(self._buffers(site.spec))
            report = dataclasses.replace(
                report, kernel=plan.kernel, handed=plan.words + ", its weights beside it" * site.beside, others=plan.others
            )
            return dataclasses.replace(report, own_call=not plan.is_new, deterministic=plan.deterministic)
        assert attempt.reason is not None
        if site.call is not None:
            return _kept(report, attempt.reason)
        return dataclasses.replace(report, reasons=(attempt.reason,))

    def _replaced(self, planner: Planner, site: CapturedSite) -> CallPlan:
        """Puts a call into the place of an attention: one without flex attention where its rule cannot be passed.

        Raises:
            Refused: No call is exact.
        """
        trained = self._is_trained(site.spec)
        plan = planner.plan(site, trained=trained)
        try:
            if plan.is_new:
                self._rewriter.replace(site, plan)
        except Refused as refused:
            if plan.form != "rule":
                raise
            plan = planner.plan(site, trained=trained, no_rule=refused.reason)
            if plan.is_new:
                self._rewriter.replace(site, plan)
        return plan

    def _device(self, site: CapturedSite) -> TrainingDevice:
        """The device that the queries are on.

        Raises:
            Refused: It is neither a CPU nor a CUDA device.
        """
        known = (self._traced.nodes.get(source.indexed.value) for source in site.spec.query)
        fake = next((self._traced.fakes[node] for node in known if node is not None and node in self._traced.fakes), None)
        kind = "cpu" if fake is None else fake.device.type
        major, minor, *_ = torch.__version__.split(".")
        version = int(major), int(minor)
        if kind == "cpu":
            return TrainingDevice("cpu", torch=version)
        if kind != "cuda":
            raise Refused("other-device", f"the module is on {kind}, of whose kernels nothing is known")
        first, second = torch.cuda.get_device_capability()
        return TrainingDevice("cuda", first * 10 + second, version)

    def _is_trained(self, spec: AttentionSpec) -> bool:
        """Whether a gradient is asked for something that is added to the scores."""
        above = sources(mask_values(spec.mask), lambda value, _: _may_have_a_gradient(value))
        return not self._traced.reached.isdisjoint(filter(_may_have_a_gradient, above))

    def _buffers(self, spec: AttentionSpec) -> Iterator[int]:
        """The buffers that decide the reading between the operands."""
        inside = set(spec.nodes)
        operands = {source.indexed.value for operand in spec.operands() for source in operand}
        beside = (value for node in spec.nodes for value in node.inputs if value is not None and value.producer() not in inside)
        for value in sources(value for value in beside if value not in operands):
            if value in self._traced.constants:
                yield self._traced.constants[value]


def _kept(report: TrainingSiteReport, reason: Reason) -> TrainingSiteReport:
    """A call of the module that stays."""
    others = (("another call", reason),)
    kept = dataclasses.replace(report, kernel="as PyTorch chooses", handed="the module's own call", own_call=True, others=others)
    return dataclasses.replace(kept, deterministic=not torch.cuda.is_available())


def _may_have_a_gradient(value: ir.Value) -> bool:
    """Whether a gradient may pass through a value; none passes through a length, a comparison, or a detached value."""
    node = value.producer()
    ends = node is not None and node.op_type == APART
    return not ends and (value.dtype is None or value.dtype.is_floating_point())
