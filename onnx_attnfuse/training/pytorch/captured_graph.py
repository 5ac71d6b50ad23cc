"""One captured graph rewritten: read, planned and replaced site by site, with a report; graphs inside of checkpoints too.

PyTorch's `multi_head_attention_forward`, which Dynamo keeps as one call, is opened into the operators that it is made of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from onnx_attnfuse.attention.spec import AttentionSpec, mask_values
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.pytorch.emitter import APART
from onnx_attnfuse.training.pytorch.gradients import Gradients
from onnx_attnfuse.training.pytorch.plan import CallPlan, Planner, Wishes
from onnx_attnfuse.training.pytorch.rewrite import Rewriter
from onnx_attnfuse.training.pytorch.sites import CapturedSite, Reading, SiteReader
from onnx_attnfuse.training.pytorch.trace import Constants, Traced, trace
from onnx_attnfuse.training.report import TrainingSiteReport

_FUSING = Subject("fusing an attention")
_LOG = logging.getLogger(__name__)
_CALL: Any = torch.nn.functional.multi_head_attention_forward


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
                report, kernel=plan.kernel, handed=plan.words + ", its weights computed apart" * site.beside, others=plan.others
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


_map: Any = importlib.import_module("torch.fx.node").map_arg


def open_calls(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Opens every call in a captured graph, in place, without unused weights; a call that cannot be opened stays.

    Args:
        module: The graph.
        mode: The mode of its fake tensors.
    """
    for node in [node for node in module.graph.nodes if node.op == "call_function" and node.target is _CALL]:
        try:
            inside = _traced(node, mode)
        except Exception:  # noqa: BLE001 - the call is right as it is
            _LOG.debug("'%s' is not opened", node.name, exc_info=True)
            continue
        getters = all(user.target is operator.getitem for user in node.users)
        if getters and not any(item.op == "get_attr" for item in inside.nodes):
            _put(module.graph, node, inside)


def _traced(node: fx.Node, mode: FakeTensorMode) -> fx.Graph:
    """The operators of a call, with a placeholder for each node that it takes."""
    taken = node.all_input_nodes

    def call(*given: Any) -> Any:
        values: Mapping[fx.Node, Any] = dict(zip(taken, given, strict=True))

        def of(item: fx.Node) -> Any:
            return values[item]

        return _CALL(*_map(node.args, of), **_map(node.kwargs, of))

    with mode, contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        return make_fx(call, pre_dispatch=True)(*(item.meta["example_value"] for item in taken)).graph


def _put(graph: fx.Graph, node: fx.Node, inside: fx.Graph) -> None:
    """Puts operators into the place of a call."""
    values: dict[fx.Node, fx.Node] = {}
    places = [item for item in inside.nodes if item.op == "placeholder"]
    values.update(zip(places, node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(inside, values)
    made = [values[item] for item in inside.nodes if item.op == "call_function"]
    for item in made:
        item.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    for user in list(node.users):
        new = results[user.args[1]]
        if isinstance(new, fx.Node):
            new.meta["example_value"] = user.meta.get("example_value")
            user.replace_all_uses_with(new, propagate_meta=False)
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
    for item in reversed(made):
        if not item.users:
            graph.erase_node(item)
