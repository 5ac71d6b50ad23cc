"""Building a region on packed tokens beside the graph, each item verified by itself before it is built.

An item that gives for tokens taken out of a batch what it gives for the batch, at these tokens, does so in any order of items. So
every operator is verified alone, between unpad and pad, with other numbers in place of its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.packing.forms import AttentionForm
from onnx_attnfuse.fusion.packing.region import Item, Region, Site, anchor
from onnx_attnfuse.fusion.packing.tokens import Marks, PadUnpad, UnpadRows
from onnx_attnfuse.fusion.packing.tokenwise import Step
from onnx_attnfuse.fusion.plan import PlanContext, params_of
from onnx_attnfuse.fusion.report_site import kernel_of_forecast
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.sweep import take_back
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.forecast import forecast
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.rewriting import GraphContext
from onnx_attnfuse.targets import multi_head_attention, packed
from onnx_attnfuse.targets.base import MaskEncoding
from onnx_attnfuse.verify.verdict import Verified

_MAX_SCALAR_LIKE_ELEMENTS = 16
"""Constants of at most so many elements are numbers that matter; larger ones are weights."""


@dataclasses.dataclass(frozen=True)
class PackedRegion:
    """A region on packed tokens beside the graph, verified and not connected yet."""

    region: Region
    restored: dict[ir.Value, ir.Value]
    """The value, padding restored, that takes the place of each exit of the region."""
    form: AttentionForm
    verified: dict[Site, Verified | None]
    added: frozenset[ir.Node]
    """The nodes that were built."""


def build_region(region: Region, form: AttentionForm, graph: GraphContext) -> PackedRegion:
    """Builds a region, inside a rewrite.

    Raises:
        Refused: An item is not equal on packed tokens.
    """
    return _RegionBuilder(region, form, graph).go()


class _RegionBuilder:
    def __init__(self, region: Region, form: AttentionForm, graph: GraphContext) -> None:
        self._region = region
        self._form = form
        self._graph = graph
        self._builder = graph.builder
        self._pad_unpad = form.pad_unpad()
        self._packed: dict[ir.Value, ir.Value] = {}
        self._verified: dict[Site, Verified | None] = {}

    def go(self) -> PackedRegion:
        builder = self._builder
        nodes, constants = len(builder.added), len(builder.constants)
        verdicts = [self._judged(item) for item in self._region.items]
        self._forget_trials(nodes, constants)
        for item, verdict in zip(self._region.items, verdicts, strict=True):
            self._builder.at(anchor(item))
            for value, marks in _operands(item):
                if value not in self._packed:
                    self._packed[value] = self._pad_unpad.unpad(value, marks)
            operands = [self._packed[value] for value, _ in _operands(item)]
            if isinstance(item, Site):
                self._verified[item] = verdict
                self._packed[item.result.value] = self._form.attend(item, operands, self._pad_unpad)
            else:
                self._packed.update(zip(item.node.outputs, item.on_packed(self._builder, operands), strict=False))
        restored = {value: self._restored(value, marks) for value, marks in self._region.exits.items()}
        added = frozenset(self._builder.added)
        return PackedRegion(self._region, restored, self._form, self._verified, added)

    def _restored(self, value: ir.Value, marks: Marks) -> ir.Value:
        node = producer_of(value)
        self._builder.at(node)
        return self._pad_unpad.pad(self._packed[value], value, marks)

    def _forget_trials(self, nodes: int, constants: int) -> None:
        """Removes the nodes built for verification, that is all but so many nodes and constants; their names are free again."""
        builder = self._builder
        trials = builder.added[nodes:]
        take_back(trials, builder.constants[constants:])
        builder.names.difference_update(item.name for node in trials for item in (node, *node.outputs) if item.name is not None)
        del builder.added[nodes:], builder.constants[constants:]

    def _judged(self, item: Item) -> Verified | None:
        """Has an item judged by itself.

        Raises:
            Refused: It differs, or could not be shown equal.
        """
        if self._graph.verifier.level == "none":
            return None
        self._builder.at(anchor(item))
        keep, given = self._form.keep, None
        pad_unpad: PadUnpad
        compute: Callable[[Sequence[ir.Value]], Sequence[ir.Value]]
        if isinstance(item, Site):
            site, inside = item, self._form.trial()
            pad_unpad, given = inside, self._form.given
            compute = lambda operands: [self._form.attend(site, operands, inside)]  # noqa: E731 - one of two
            outputs = [(item.result.value, item.marks)]
        else:
            step, pad_unpad = item, UnpadRows(self._builder, self._region.tokens, keep)
            compute = lambda operands: step.on_packed(self._builder, operands)  # noqa: E731 - the other
            outputs = list(zip(item.node.outputs, item.outputs, strict=False))
        news = compute([pad_unpad.unpad(value, marks) for value, marks in _operands(item)])
        pairs = [
            (pad_unpad.masked(old, marks, keep), pad_unpad.pad(new, old, marks))
            for (old, marks), new in zip(outputs, news, strict=False)
        ]
        frontier = [value for value, _ in _operands(item)] + _weights(item)
        try:
            name = anchor(item).name or ""
            return self._graph.verify(pairs, frontier, name, given)
        except Refused as refused:
            reason = refused.reason
            raise Refused(reason.code, f"on packed tokens: {reason.message}", anchor(item).name) from refused


def _operands(item: Item) -> list[tuple[ir.Value, Marks]]:
    """The inputs of a step or an attention that consist of tokens, with their marks."""
    if isinstance(item, Step):
        return item.inputs()
    return [(source.indexed.value, marks) for source, marks in zip(item.chosen, item.operands, strict=True)]


def _weights(item: Item) -> list[ir.Value]:
    """Large constants, in place of which the judge may take any numbers."""
    if isinstance(item, Site):
        return []
    found: list[ir.Value] = []
    for value in item.free():
        tensor = constant_tensor(value)
        if tensor is not None and tensor.size > _MAX_SCALAR_LIKE_ELEMENTS and tensor.dtype.is_floating_point():
            found.append(value)
    return found


_WHEN = "padding is on the right"
_MAX_LISTED_NAMES = 3
_SHAPE_ONLY = Reason("shape-used", "only the shape of its result is used, which packing does not need")


def packed_params(spec: AttentionSpec, meaning: Meaning, plan_context: PlanContext) -> AttentionParams:
    """Parameters of an attention on packed tokens, for the forecast of its kernel."""
    params = params_of(spec, MaskEncoding("bias" if meaning.biases else "none", when="right_padded"), multi_head_attention)
    return dataclasses.replace(params, op=packed.INFO.key).with_lengths(plan_context.lengths)


def packed_report(
    found: SiteReport, packed_region: PackedRegion, site: Site, plan_context: PlanContext, usual: SiteReport | None
) -> SiteReport:
    """The report on one attention.

    Args:
        found: The report before.
        packed_region: The packed region.
        site: The attention.
        plan_context: The context of its plan.
        usual: The report on its form where padding is not on the right; None if it is taken to be.
    """
    attended = packed_region.form.attended.get(site)
    if attended is None:
        return usual or dataclasses.replace(found, reasons=(_SHAPE_ONLY,))
    form = "packed + attention_bias" if site.meaning.biases else "packed"
    forecast_packed = forecast(packed_params(site.spec, site.meaning, plan_context), plan_context.device)
    form = form if usual is None else f"{form}, else {usual.mask_form or 'decomposed'}"
    return dataclasses.replace(
        found,
        status="fused",
        op=packed.INFO.name,
        domain=packed.INFO.domain,
        scale=attended.scale,
        mask_form=form,
        kernel=kernel_of_forecast(forecast_packed, plan_context.device, _WHEN, None if usual is None else usual.kernel),
        layout=attended.layouts,
        verified=packed_region.verified[site],
        reasons=() if usual is None else usual.reasons,
    )


def note(packed_region: PackedRegion, where: str) -> str:
    """A line on the packed nodes, its values still called as they are in the source."""
    region = packed_region.region
    removed = _listed(sorted(value.name or "" for value in region.entries))
    restored = _listed(sorted(value.name or "" for value in region.exits))
    assumed = " (assumes padded-rows-unused)" if packed_region.form.changes_padding else ""
    line = f"padding{where} is removed from {removed} and restored as 0 in {restored}{assumed}"
    readers = sorted({node.op_type for found in region.readers.values() for node in found})
    return f"{line}, which {_listed(readers)} reads" if readers else line


def _listed(names: list[str]) -> str:
    shown = names[:_MAX_LISTED_NAMES] + (["…"] if len(names) > _MAX_LISTED_NAMES else [])
    return ", ".join(f"'{name}'" if name != "…" else name for name in shown)
