"""Attentions of a captured graph: each softmax read as the engine reads one of an exported model, with its dropout and origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from torch import fx

from onnx_attnfuse.attention.axes.factors import leaves, refined
from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.match.softmax import Softmax, find_softmax, with_sink
from onnx_attnfuse.attention.match.softmax_attention import read_site
from onnx_attnfuse.attention.spec import AttentionSpec, mask_operands
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.fusion.pattern_rewrites.rewrites import write_formulas
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import PatternRewriter, PatternStatistics
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS
from onnx_attnfuse.graph.scopes import Scope, all_names
from onnx_attnfuse.graph.uses import reached, viewers
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.language.registry.registry import Catalogue
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.training.pytorch.emitter import APART, OPSET
from onnx_attnfuse.training.pytorch.trace import Traced
from onnx_attnfuse.training.report import TrainingSiteReport, shape_in_words
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.runtime import available
from onnx_attnfuse.verify.verifier import Verifier

_IR_VERSION = 10
_READING = Subject("reading an attention")


@dataclasses.dataclass(frozen=True)
class CapturedSite:
    """One attention of a captured graph."""

    spec: AttentionSpec
    meaning: Meaning
    dropout: float
    """The share of weights that is dropped at each step."""
    call: fx.Node | None
    """The `scaled_dot_product_attention` that computes it; None where it is decomposed."""
    beside: bool = False
    """Scores or weights are also looked at, without a gradient, and so are computed beside the call."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One softmax: its attention, or why it is not read."""

    report: TrainingSiteReport
    site: CapturedSite | None


class SiteReader:
    """Reads the attentions of a captured graph."""

    def __init__(self, traced: Traced, patterns: tuple[Any, ...] = ()) -> None:
        self.traced = traced
        graph = traced.graph
        self.facts = Facts(graph)
        self.bounds, self.reader = Bounds(self.facts), Reader(self.facts)
        catalogue = load(Options(patterns=patterns))
        self._readers = catalogue.readers
        model = ir.Model(graph, ir_version=_IR_VERSION)
        scope = Scope(graph.name or "captured", graph, self.facts, OPSET)
        builder = Builder(graph, self.facts, OPSET, all_names(model))
        verifier = Verifier(Options(ep="cpu", verify=None if available() else "none"), keep_evidence=False)
        self._context = GraphContext(scope, model, builder, verifier)
        self._read_formulas(catalogue)
        self._ends = {node.name for node in graph if node.op_type == APART and _is_multiplied(node.outputs[0])}

    def _read_formulas(self, catalogue: Catalogue) -> None:
        """Replaces the formulas of patterns by their meaning, in the description alone."""
        for node in self.traced.graph:
            if node.op_type == APART:
                _follow_largest(node)
        drops = [node for node, (share, training) in self.traced.drops.items() if training and share]
        for node in drops:  # no formula reads through one
            node.op_type = "Dropped"
        rewriter = PatternRewriter(self._context, catalogue, PatternStatistics(), keep_outputs=False)
        write_formulas(rewriter)
        for node in drops:
            node.op_type = "Identity"
        for change in rewriter.done:
            if change.old in self.traced.nodes:
                self.traced.nodes[change.new] = self.traced.nodes[change.old]

    def read(self) -> Iterator[Reading]:
        """Every softmax that is an attention, in the order of the graph."""
        for node in self.traced.graph:
            softmax = find_softmax(node, self.facts, OPSET)
            reading = None if softmax is None else self._read(with_sink(softmax, self.facts))
            if reading is not None:
                yield reading

    def _read(self, softmax: Softmax) -> Reading | None:
        name = self._name(softmax)
        report = TrainingSiteReport(name, None)
        with contained(_READING, name) as attempt:
            spec = read_site(softmax, self.facts, self._readers, keep_outputs=True)
            beside = self._computed_beside(spec)
            if beside is None:
                read_site(softmax, self.facts, self._readers)  # refuses, with the reason
            spec = dataclasses.replace(_with_all_heads(spec), name=name)
            self._check_width(spec, softmax)
            meaning = self._context.check_mask(spec, understand(spec, self.reader))
            report = dataclasses.replace(report, mask=meaning.kind, mask_text=meaning.text or None, shape=shape_in_words(spec))
            site = CapturedSite(spec, meaning, self._dropout(spec), self.traced.calls.get(softmax.node), bool(beside))
            return Reading(dataclasses.replace(report, dropout=site.dropout), site)
        reason = attempt.reason
        assert reason is not None
        if reason.code == "inner-value-used":
            reason = dataclasses.replace(reason, message=reason.message.partition(";")[0])
        if reason.node in self._ends:
            reason = Reason("gradient-ends", "a gradient ends between its scores and its result, which no kernel leaves out")
        return None if reason.code == "not-attention" else Reading(_with(report, reason), None)

    def _computed_beside(self, spec: AttentionSpec) -> bool | None:
        """Whether scores or weights are also looked at; None where a gradient comes from there, or they are dropped at random."""
        inside, dropped, found = set(spec.nodes), False, False
        for node in spec.nodes:
            share, training = self.traced.drops.get(node, (0.0, False))
            dropped |= training and share > 0
            for value in node.outputs:
                others = [item for user in viewers(value) if user not in inside for item in user.outputs]
                if value is spec.output[0].value or not (others or value.is_graph_output()):
                    continue
                if value.is_graph_output() or dropped or not self.traced.ended.issuperset(others):
                    return None
                found = True
        return found

    def _check_width(self, spec: AttentionSpec, softmax: Softmax) -> None:
        """Checks that the softmax has no narrower type than the products, where a fill may be infinite that was not.

        Raises:
            Refused: It has.
        """
        own = self.facts.dtype(softmax.scores)
        if spec.dtype is not None and own is not None and own.itemsize < spec.dtype.itemsize:
            raise Refused("mixed-types", f"the softmax is taken in {type_name(own)}, the products in {type_name(spec.dtype)}")

    def _dropout(self, spec: AttentionSpec) -> float:
        """The dropout of the weights.

        Raises:
            Refused: The weights are dropped more than once.
        """
        shares = [
            share for node in spec.nodes for share, training in [self.traced.drops.get(node, (0.0, False))] if training and share
        ]
        if len(shares) > 1:
            raise Refused("several-dropouts", "the weights are dropped more than once")
        return shares[0] if shares else 0.0

    def _name(self, softmax: Softmax) -> str:
        """The place of the module that computes a softmax, as its attributes lead there."""
        call = self.traced.calls.get(softmax.node) or self.traced.nodes.get(softmax.weights)
        stack: dict[str, tuple[str, Any]] = {} if call is None else call.meta.get("nn_module_stack") or {}
        path = [place for place, _ in stack.values()]
        own = "softmax" if call is None else call.name
        return f"{_path(path[-1])}/{own}" if path else own


def _with_all_heads(spec: AttentionSpec) -> AttentionSpec:
    """The attention whose rows are those that its mask tells apart; several queries in one of these are heads that share keys."""
    told = {leaf for indexed in mask_operands(spec.mask) for axis in refined(indexed.axes) for leaf in axis}
    rows = leaves(spec.query_axis)
    heads = tuple(leaf for leaf in rows if leaf not in told and isinstance(leaf.size, int))
    if not heads or len(heads) == len(rows):
        return spec
    batch, own = (*spec.batch_axis, *heads), (*spec.heads, *heads)
    return dataclasses.replace(spec, query_axis=tuple(leaf for leaf in rows if leaf in told), batch_axis=batch, heads=own)


def _follow_largest(apart: ir.Node) -> None:
    """Reads through the end of a gradient at a row's maximum that is subtracted from the row: a softmax does not depend on it."""
    way, largest = list[ir.Node](), apart
    while largest is not None and largest.op_type in {APART, "Identity"}:
        way.append(largest)
        (source,) = largest.inputs
        largest = None if source is None else source.producer()
    if largest is None or largest.op_type != "ReduceMax":
        return
    for user, place in apart.outputs[0].uses():
        if user.op_type == "Sub" and place == 1 and user.inputs[0] is largest.inputs[0]:
            user.replace_input_with(1, largest.outputs[0])
    for node in way:
        if node.graph is not None and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            node.graph.remove(node, safe=True)


def _is_multiplied(value: ir.Value) -> bool:
    """Whether a value is a factor of a product, or the operand of a softmax, as it is or as a view."""
    views = REARRANGES | REPEATS | CASTS
    values = reached([value], lambda item: (view for node, _ in item.uses() if node.op_type in views for view in node.outputs))
    return any(node.op_type in {"MatMul", "Softmax"} for item in values for node, _ in item.uses())


def _path(place: str) -> str:
    """`L['self'].layers[0].attention` without Dynamo's prefix."""
    for sign in ("L['self'].", "L['fn']."):
        place = place.removeprefix(sign)
    return place.replace("_modules['", "").replace("']", "")


def _with(report: TrainingSiteReport, reason: Reason) -> TrainingSiteReport:
    return dataclasses.replace(report, reasons=(reason,))
