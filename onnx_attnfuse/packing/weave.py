"""Building a region on packed tokens beside the graph, each item judged by itself before it is built.

An item that gives for tokens taken out of a batch what it gives for the batch, at these tokens, does so in any order of items. So
every operator is put before the judge alone, between a way in and a way out, with other numbers in place of its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_attnfuse.axes.factors import Axes, Factor
from onnx_attnfuse.axes.views import Laid
from onnx_attnfuse.court import Court
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep, sweep_unused
from onnx_attnfuse.packing.doors import Doors, PaddingDoors, RowDoors
from onnx_attnfuse.packing.marks import Marks, count_of, others
from onnx_attnfuse.packing.region import Item, Region, Site, anchor
from onnx_attnfuse.packing.steps import Step
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.emitted import Workbench
from onnx_attnfuse.targets.packed import Attended, attend
from onnx_attnfuse.targets.padding import KeyPadding
from onnx_attnfuse.verify.verdict import Verified

_FEW = 16
"""Constants of at most so many elements are numbers that matter; larger ones are weights."""


@dataclasses.dataclass(frozen=True)
class Woven:
    """A region that stands beside the graph."""

    region: Region
    restored: dict[ir.Value, ir.Value]
    """What is to take the place of each exit."""
    attended: dict[Site, Attended]
    verified: dict[Site, Verified | None]
    exact: ir.Value
    """One truth value: the batch is padded on the right, with a key in every entry."""


@dataclasses.dataclass(frozen=True)
class Loom:
    """What is needed to build a region."""

    bench: Workbench
    scope: Scope
    model: ir.Model
    court: Court
    padding: KeyPadding
    exact: ir.Value
    """One truth value, see `Woven`."""


def weave(region: Region, loom: Loom) -> Woven:
    """Builds a region.

    Raises:
        Refused: An item is not equal on packed tokens; nothing of it is left then.
    """
    return _Weaving(region, loom).go()


class _Weaving:
    def __init__(self, region: Region, loom: Loom) -> None:
        self._region = region
        self._loom = loom
        self._builder = loom.bench.builder
        self._doors = PaddingDoors(self._builder, region.tokens, loom.padding.lengths())
        self._packed: dict[ir.Value, ir.Value] = {}
        self._attended: dict[Site, Attended] = {}
        self._verified: dict[Site, Verified | None] = {}
        self._added: list[ir.Node] = []
        self._trials: list[ir.Value] = []
        """What was built for the judge only."""

    def go(self) -> Woven:
        try:
            verdicts = [self._judged(item) for item in self._region.items]
            self._forget_trials()
            for item, verdict in zip(self._region.items, verdicts, strict=True):
                self._at(anchor(item))
                for value, marks in _operands(item):
                    if value not in self._packed:
                        self._packed[value] = self._doors.enter(value, marks)
                operands = [self._packed[value] for value, _ in _operands(item)]
                if isinstance(item, Site):
                    self._verified[item] = verdict
                    self._attended[item] = self._attend(item, operands, self._doors)
                    self._packed[item.result.value] = self._attended[item].value
                else:
                    self._packed.update(zip(item.node.outputs, _built(item, operands, self._builder), strict=False))
            restored = {value: self._restored(value, marks) for value, marks in self._region.exits.items()}
        except Exception:
            self._undo()
            raise
        return Woven(self._region, restored, self._attended, self._verified, self._loom.exact)

    def _restored(self, value: ir.Value, marks: Marks) -> ir.Value:
        node = value.producer()
        assert node is not None
        self._at(node)
        return self._doors.leave(self._packed[value], value, marks)

    def _at(self, node: ir.Node) -> None:
        self._added += self._builder.added
        self._builder.at(node)

    def _forget_trials(self) -> None:
        """Removes what was built for the judge, so that its names are free again."""
        self._added += self._builder.added
        sweep(self._trials)
        self._trials = []
        removed = [node for node in self._added if node.graph is None]
        self._builder.names.difference_update(name for node in removed for name in (node.name, *_names(node)) if name is not None)
        self._added = [node for node in self._added if node.graph is not None]
        self._builder.added = []

    def _undo(self) -> None:
        self._added += self._builder.added
        sweep(self._trials)
        sweep_unused(self._added)

    def _attend(self, site: Site, operands: Sequence[ir.Value], doors: PaddingDoors) -> Attended:
        packed_tokens = Factor(count_of(operands[0], self._builder.facts))
        laid = [
            Laid(operand, ((packed_tokens,), *others(marks, source.laid.refined().axes)))
            for operand, marks, source in zip(operands, site.operands, site.chosen, strict=True)
        ]
        assert doors.packing is not None
        wanted: Axes = others(site.marks, site.result.axes)
        return attend(self._loom.bench, site.spec, site.meaning, site.chosen, laid, doors.packing, wanted)

    def _judged(self, item: Item) -> Verified | None:
        """Has an item judged by itself.

        Raises:
            Refused: It differs, or could not be shown equal.
        """
        if self._loom.court.level == "none":
            return None
        self._at(anchor(item))
        keep = self._loom.padding.keep
        doors: Doors = RowDoors(self._builder, self._region.tokens, keep)
        given = None
        compute: Callable[[Sequence[ir.Value]], Sequence[ir.Value]]
        if isinstance(item, Site):
            site, inside = item, PaddingDoors(self._builder, self._region.tokens, self._loom.padding.lengths())
            doors, given = inside, self._loom.exact
            compute = lambda operands: [self._attend(site, operands, inside).value]  # noqa: E731 - one of two
            outputs = [(item.result.value, item.marks)]
        else:
            step = item
            compute = lambda operands: _built(step, operands, self._builder)  # noqa: E731 - the other
            outputs = list(zip(item.node.outputs, item.outputs, strict=False))
        news = compute([doors.enter(value, marks) for value, marks in _operands(item)])
        pairs = [
            (doors.masked(old, marks, keep), doors.leave(new, old, marks))
            for (old, marks), new in zip(outputs, news, strict=False)
        ]
        stops = [value for value, _ in _operands(item)] + _weights(item)
        self._trials += [value for pair in pairs for value in pair]
        try:
            name = anchor(item).name or ""
            return self._loom.court.pairs(pairs, stops, name, self._loom.scope, self._loom.model, given)
        except Refused as refused:
            reason = refused.reason
            raise Refused(reason.code, f"on packed tokens: {reason.message}", anchor(item).name) from refused


def _operands(item: Item) -> list[tuple[ir.Value, Marks]]:
    """What consists of tokens."""
    if isinstance(item, Step):
        return item.inputs()
    return [(source.laid.value, marks) for source, marks in zip(item.chosen, item.operands, strict=True)]


def _built(step: Step, operands: Sequence[ir.Value], builder: Builder) -> Sequence[ir.Value]:
    """The outputs of a node on packed tokens."""
    return step.build(builder, dict(zip(step.marks, operands, strict=True)))


def _names(node: ir.Node) -> list[str | None]:
    return [value.name for value in node.outputs]


def _weights(item: Item) -> list[ir.Value]:
    """Large constants, in place of which the judge may take any numbers."""
    if isinstance(item, Site):
        return []
    found: list[ir.Value] = []
    for value in item.free():
        tensor = constant_tensor(value)
        if tensor is not None and tensor.size > _FEW and tensor.dtype.is_floating_point():
            found.append(value)
    return found
