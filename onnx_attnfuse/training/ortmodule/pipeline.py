"""The steps from a gradient graph to one with fused attention: find, read forward, understand, read backward, choose, replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import leaves, length
from onnx_attnfuse.attention.masks.classify import understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match.candidates import anchor_of
from onnx_attnfuse.attention.match.softmax import Softmax, find_softmax, with_sink
from onnx_attnfuse.attention.match.softmax_attention import read_site
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scopes import Scope, all_names
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.training.fully_masked_rows import treatment
from onnx_attnfuse.training.kernels import Demand, TrainingDevice, check_differentiable
from onnx_attnfuse.training.ortmodule.backward import read_backward
from onnx_attnfuse.training.ortmodule.kernels import KERNELS, AtenKernel
from onnx_attnfuse.training.ortmodule.rewrite import Handed, fuse
from onnx_attnfuse.training.ortmodule.site import Dropout, TrainingSite
from onnx_attnfuse.training.ortmodule.stand_ins import Annotations, Buffers, StandIns
from onnx_attnfuse.training.report import TrainingReport, TrainingSiteReport, shape_in_words
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.verifier import Verifier

_IR_VERSION = 8
_FUSING = Subject("fusing an attention")


def fuse_graph(
    graph: ir.Graph,
    device: TrainingDevice,
    policy: Policy,
    *,
    check_masks: bool = True,
    buffers: Mapping[str, Array] | None = None,
) -> TrainingReport:
    """Fuses every attention of a gradient graph that a kernel computes exactly, in place.

    Args:
        graph: Forward and backward part in one, as ORTModule has it.
        device: The device it will run on.
        policy: Which kernels may be used.
        check_masks: Masks that were read are compared with the results of the graph; this takes onnxruntime.
        buffers: By the names of inputs, their contents as long as the graph is used; the report says which of them count.

    Returns:
        The result at every site, with reasons.
    """
    return _Run(graph, device, policy, check_masks=check_masks, buffers=buffers or {}).go()


class _Run:
    """One pass over one graph."""

    def __init__(
        self, graph: ir.Graph, device: TrainingDevice, policy: Policy, *, check_masks: bool, buffers: Mapping[str, Array]
    ) -> None:
        self.graph, self.device, self.policy = graph, device, policy
        self.model = ir.Model(graph, ir_version=_IR_VERSION)
        self.opset = graph.opset_imports.get("", 17)
        self.standins = StandIns(graph)
        self.buffers = Buffers(graph, buffers)
        graph.sort()
        self.annotations = Annotations(graph)
        self.facts = Facts(graph)
        self.bounds, self.reader = Bounds(self.facts), Reader(self.facts)
        self.readers = load(Options()).readers
        scope = Scope(graph.name or "training", graph, self.facts, self.opset)
        builder = Builder(graph, self.facts, self.opset, all_names(self.model))
        verifier = Verifier(Options(ep="cpu", verify=None if check_masks else "none"), keep_evidence=False)
        self.rewriter = GraphContext(scope, self.model, builder, verifier)

    @aside()
    def go(self) -> TrainingReport:
        """Every softmax of the graph in its order."""
        found = [softmax for node in self.graph if (softmax := find_softmax(node, self.facts, self.opset)) is not None]
        sites = [report for softmax in found if (report := self._site(with_sink(softmax, self.facts))) is not None]
        self.standins.restore()
        self.buffers.restore()
        self.annotations.restore()
        self.graph.sort()
        return TrainingReport(self.device.name, tuple(sites))

    def _site(self, softmax: Softmax) -> TrainingSiteReport | None:
        """One softmax; None if it is no attention."""
        name = _name(softmax, self.standins)
        reported = TrainingSiteReport(name, None)
        with contained(_FUSING, name) as attempt:
            spec = read_site(softmax, self.facts, self.readers, keep_outputs=True)
            return self._fused(dataclasses.replace(spec, name=name), softmax, reported)
        reason = attempt.reason
        assert reason is not None
        return None if reason.code == "not-attention" else dataclasses.replace(reported, reasons=(reason,))

    def _fused(self, spec: AttentionSpec, softmax: Softmax, reported: TrainingSiteReport) -> TrainingSiteReport:
        """One attention: replaced, or left with the reasons."""
        meaning = self.rewriter.check_mask(spec, understand(spec, self.reader))
        reported = dataclasses.replace(
            reported,
            mask=meaning.kind,
            mask_text=meaning.text or None,
            shape=shape_in_words(spec),
            buffers=self.buffers.read_by(spec),
        )
        try:
            _check(spec)
            replaced = [node for item in spec.nodes if (node := self.standins.replaced_by(item)) is not None]
            dropout = self._dropout(replaced)
            reported = dataclasses.replace(reported, dropout=0.0 if dropout is None else dropout.ratio)
            guard = self.standins.guard(replaced)
            backward = read_backward(spec, softmax, dropout, replaced, self.facts, None if guard is None else guard.sees)
            site = TrainingSite(spec, meaning, backward, dropout, guard is not None)
        except Refused as refused:
            return dataclasses.replace(reported, reasons=(refused.reason,))
        demand = _demand(site, self.facts)
        others: list[tuple[str, Reason]] = []
        for kernel in self._order():
            reason = self._refusal(kernel, demand)
            if reason is not None:
                others.append((kernel.name, reason))
                continue
            with self.rewriter.rewrite(anchor_of(spec), _FUSING, spec.name) as edit:
                handed = self._handed(site, demand)
                fuse(site, kernel, handed, self.rewriter.builder, edit)
                self.standins.forget()
                return dataclasses.replace(reported, kernel=kernel.name, handed=_words(handed), others=tuple(others))
            assert edit.reason is not None
            others.append((kernel.name, edit.reason))
        return dataclasses.replace(reported, others=tuple(others))

    def _order(self) -> list[AtenKernel]:
        """The kernels of this device, those that are asked for first."""
        here = [kernel for kernel in KERNELS if kernel.device == self.device.kind]
        return sorted(here, key=lambda kernel: not self._switch(kernel))

    def _switch(self, kernel: AtenKernel) -> bool | None:
        return {"flash": self.policy.flash, "efficient": self.policy.efficient}.get(kernel.switch or "")

    def _refusal(self, kernel: AtenKernel, demand: Demand) -> Reason | None:
        """Why a kernel is not taken."""
        if self._switch(kernel) is False:
            return Reason("switched-off", "it is switched off")
        return kernel.refuse(demand, self.device)

    def _handed(self, site: TrainingSite, demand: Demand) -> Handed:
        """How the mask is passed.

        Raises:
            Refused: No way is exact.
        """
        rows = treatment(site.spec, site.meaning, self.reader, self.bounds, zeroed=site.zeroed) if demand.bias else "none"
        return Handed(demand.causal, demand.bias, rows)

    def _dropout(self, replaced: Sequence[ir.Node]) -> Dropout | None:
        """The dropout of the attention weights, found among the nodes that others were read in the place of; None without one.

        Raises:
            Refused: The ratio is not known, or the weights are dropped more than once.
        """
        found = [node for node in replaced if node.op_type in {"Dropout", "BitmaskDropout"}]
        if not found:
            return None
        if len(found) > 1:
            raise Refused("several-dropouts", "the weights are dropped more than once", found[1].name)
        node = found[0]
        ratio = 0.5 if node.inputs[1] is None else self.facts.number(node.inputs[1])
        if ratio is None:
            raise Refused("unknown-dropout", "the dropout rate is unknown before the model runs", node.name)
        mask = node.outputs[1] if len(node.outputs) > 1 else None
        return Dropout(node, ratio, mask) if ratio else None


def _name(softmax: Softmax, standins: StandIns) -> str:
    node = standins.replaced_by(softmax.node) or softmax.node
    return node.name or softmax.weights.name or "softmax"


def _check(spec: AttentionSpec) -> None:
    """Refuses attentions that no kernel with a gradient computes.

    Raises:
        Refused: A soft cap, a sink, or another feature without a gradient.
    """
    if spec.softcap is not None:
        raise Refused("softcap", "the scores are capped by tanh, which no kernel with a gradient does")
    if spec.row_rules:
        raise Refused("row-rule", "rows are zeroed after the softmax, which no kernel differentiates")
    if spec.sink is not None:
        raise Refused("sink", "the softmax has a score without a value, which no kernel with a gradient has")
    if spec.scale_values:
        name = spec.scale_values[0].indexed.value.name
        raise Refused("computed-scale", f"the scores are scaled by '{name}', which is not a plain number")
    check_differentiable(spec)


def _demand(site: TrainingSite, facts: Facts) -> Demand:
    """A site's demand on a kernel; a mask whose gradient is asked for is passed as a bias, also where it only masks."""
    spec, meaning = site.spec, site.meaning
    axes, triangle, trained = spec.axes, meaning.only_causal, bool(site.backward.biases)
    causal = triangle is not None and triangle.offset == 0 and not trained
    return Demand(
        dtype=spec.dtype,
        head_size=length(axes.h),
        v_head_size=_v_head_size(spec, facts),
        bias=bool(spec.mask) and not causal and (trained or not meaning.is_trivial),
        causal=causal,
        square=length(axes.i) == length(axes.j),
        dropout=0.0 if site.dropout is None else site.dropout.ratio,
        bias_gradient=trained,
    )


def _v_head_size(spec: AttentionSpec, facts: Facts) -> Dim:
    """The channels of values: as many as queries have where keys are as wide as values, as the product of both repeats none."""
    channels, size = leaves(spec.axes.h), length(spec.axes.v)
    for source in () if isinstance(size, int) else (*spec.query, *spec.key):
        dims = facts.dims(source.indexed.value) or ()
        if any(dim == size and leaves(axis) == channels for dim, axis in zip(dims, source.indexed.axes, strict=False)):
            return length(channels)
    return size


def _words(handed: Handed) -> str:
    if handed.causal:
        return "causal by attribute"
    if not handed.bias:
        return "without a mask"
    return "its mask as a bias" + (", rows without a key apart" if handed.rows != "none" else "")
