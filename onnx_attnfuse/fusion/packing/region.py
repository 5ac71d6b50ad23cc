"""The region that can be computed on packed tokens around some attentions: where padding is removed, restored, and all between.

`grow` walks upwards from the operands of every attention. Tokenwise operators next to an attention have to be
in the region, else padding would be restored and removed again; of the nodes before, the fewest values are sought through which
all of it passes, and padding is removed there; of the nodes after, the same for restoring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.fusion.packing.min_cut import least_cut
from onnx_attnfuse.fusion.packing.tokens import Tokens, read_marks
from onnx_attnfuse.fusion.packing.tokenwise import Step, read_step
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.constants import is_constant
from onnx_attnfuse.graph.ops import ASKS_SHAPE
from onnx_attnfuse.graph.uses import dependents, live, producer_of, reached
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.targets.packed import choose

CARRIED = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL])
"""Types that padding can be removed from and restored in; truth values as numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """An attention that is to be computed on packed tokens."""

    spec: AttentionSpec
    meaning: Meaning
    chosen: tuple[Source, Source, Source]
    operands: tuple[Marks, Marks, Marks]
    result: IndexedValue
    marks: Marks

    def inputs(self) -> list[tuple[ir.Value, Marks]]:
        """The operands, with their marks."""
        return [(source.indexed.value, marks) for source, marks in zip(self.chosen, self.operands, strict=True)]


Item: TypeAlias = "Step | Site"


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the graph that is computed on packed tokens."""

    tokens: Tokens
    sites: tuple[Site, ...]
    items: tuple[Item, ...]
    """The attentions and token-wise nodes of the region, in topological order."""
    entries: dict[ir.Value, Marks]
    """Values where padding is removed, with their marks."""
    exits: dict[ir.Value, Marks]
    """Values where padding is restored, with their marks."""
    readers: dict[ir.Value, tuple[ir.Node, ...]]
    """Who reads the restored values."""
    inner: tuple[ir.Value, ...]
    """Values that are computed in packed form only, in order."""


class SiteRefused(Exception):
    """One attention does not belong to the others."""

    def __init__(self, site: Site, reason: Reason) -> None:
        super().__init__(str(reason))
        self.site = site
        self.reason = reason


def read_site(spec: AttentionSpec, meaning: Meaning, *, rotated: bool) -> Site:
    """An attention with its operands as tokens.

    Args:
        spec: The attention.
        meaning: Its mask.
        rotated: Rotations of queries and keys may belong to the attention; if not it is computed token by token, or not at all.

    Raises:
        Refused: An operand or the result is laid out so that tokens are mixed with something else.
    """
    axes = spec.axes
    chosen: list[Source] = []
    marks: list[Marks] = []
    for operand, rows, channels in zip(spec.operands(), (axes.i, axes.j, axes.j), (axes.h, axes.h, axes.v), strict=True):
        plain = [source for source in operand if rotated or source.rotary is None]
        fitting = [source for source in plain if read_marks(source.indexed.axes, axes.b, rows) is not None]
        if not fitting:
            raise Refused("layout", f"'{operand[0].indexed.value.name}' is not laid out by tokens")
        source = choose(fitting, axes.b, rows, (*axes.n, *channels))
        chosen.append(source)
        marks += filter(None, [read_marks(source.indexed.axes, axes.b, rows)])
    for indexed in reversed(spec.output):
        found = read_marks(indexed.axes, axes.b, axes.i)
        if found is not None:
            return Site(
                spec, meaning, (chosen[0], chosen[1], chosen[2]), (marks[0], marks[1], marks[2]), indexed.refined(), found
            )
    raise Refused("layout", f"'{spec.output[0].value.name}' is not laid out by tokens")


def grow(sites: Sequence[Site], graph: ir.Graph, tokens: Tokens) -> Region:
    """The region around `sites`, which all have the same padding.

    Raises:
        Refused: An operator between them mixes tokens, or is not known.
        SiteRefused: One of them is no attention of a sequence with itself.
    """
    return _Growing(sites, graph, tokens).region()


class _Growing:
    def __init__(self, sites: Sequence[Site], graph: ir.Graph, tokens: Tokens) -> None:
        self._sites = sites
        self._graph = graph
        self._tokens = tokens
        self._produced = {site.result.value: site for site in sites}
        self._late = below(self._produced, graph)
        self._marks: dict[ir.Value, Marks] = {}
        self._steps: dict[ir.Value, Step] = {}
        """By output, the values computed on packed tokens."""
        self._given: dict[ir.Value, Reason] = {}
        """Why other values cannot be."""
        self._place = {node: place for place, node in enumerate(graph)}

    def region(self) -> Region:
        for site in self._sites:
            self._note(site.result.value, site.marks)
        for _ in reached([place for site in self._sites for place in site.inputs()], self._upwards):
            pass
        self._check_sequences()
        entries = self._entries()
        tail = self._walk_down(self._at_hand(entries))
        exits, readers = self._exits(tail)
        self._steps.update((value, step) for step in tail for value in step.node.outputs)
        items = self._needed(entries, exits)
        inner = [value for item in items for value in _results(item)]
        kept = {value: marks for value, marks in self._marks.items() if value in entries}
        found = {value: self._marks[value] for value in self._marks if value in exits}
        return Region(self._tokens, tuple(self._sites), tuple(items), kept, found, readers, tuple(inner))

    def _note(self, value: ir.Value, marks: Marks) -> None:
        """Notes the marks of a value.

        Raises:
            Refused: It has others.
        """
        if self._marks.setdefault(value, marks) != marks:
            raise Refused("two-layouts", f"'{value.name}' is used in two layouts")

    def _upwards(self, place: tuple[ir.Value, Marks]) -> list[tuple[ir.Value, Marks]]:
        """The values that a value is computed from token by token; none where it is given, or the result of an attention."""
        value, marks = place
        self._note(value, marks)
        if value in self._produced:
            return []
        step = self._step_above(value, marks)
        if isinstance(step, Reason):
            if value in self._late:
                raise Refused("operator-between", f"between the attentions {step.message}", step.node)
            self._given[value] = step
            return []
        for output, own in zip(step.node.outputs, step.outputs, strict=False):
            self._note(output, own)
            self._steps[output] = step
        return step.inputs()

    def _step_above(self, value: ir.Value, marks: Marks) -> Step | Reason:
        """The step that computes a value token by token, or the reason why the value has to be given."""
        node = value.producer()
        if node is None or is_constant(value) or not self._tokens.is_full(value, marks):
            name = node.op_type if node is not None else "an input"
            return Reason("given", f"'{value.name}' of {name} is not of every token", node.name if node is not None else None)
        step = read_step(node, value, marks, self._tokens)
        if isinstance(step, Step) and not self._late.isdisjoint(step.free()):
            return Reason("given", f"{node.op_type} takes something that is computed from all tokens", node.name)
        return step

    def _check_sequences(self) -> None:
        """Queries, keys and values of an attention must be computed from the same sequence."""
        origins: dict[ir.Value, frozenset[ir.Value]] = {}
        for item in self._ordered([*self._steps.values(), *self._sites]):
            if isinstance(item, Site):
                found = [self._origins(source.indexed.value, origins) for source in item.chosen]
                if not found[0] & found[1] & found[2]:
                    raise SiteRefused(item, self._unrelated(found))
                origins[item.result.value] = found[2]
                continue
            union = frozenset[ir.Value]().union(*(self._origins(value, origins) for value, _ in item.inputs()))
            origins.update(dict.fromkeys(item.node.outputs, union))

    def _unrelated(self, origins: Iterable[Iterable[ir.Value]]) -> Reason:
        message = "queries, keys and values may belong to different sequences"
        reasons = (self._given.get(value) for found in origins for value in found)
        unread = next((reason for reason in reasons if reason is not None and reason.code == "not-position-wise"), None)
        return (
            Reason("cross-attention", message)
            if unread is None
            else Reason("cross-attention", f"{message}: {unread.message}", unread.node)
        )

    def _origins(self, value: ir.Value, known: dict[ir.Value, frozenset[ir.Value]]) -> frozenset[ir.Value]:
        """The values that tell one sequence from another and that a value is computed from."""
        if value in known:
            return known[value]
        return frozenset([value] if self._tokens.is_full(value, self._marks[value]) else [])

    def _entries(self) -> set[ir.Value]:
        """The fewest values that padding is removed from."""
        early = [value for value in self._marks if value not in self._late]
        ahead: dict[ir.Value, list[ir.Value]] = {value: [] for value in early}
        wanted = [source.indexed.value for site in self._sites for source in site.chosen]
        for value, step in self._steps.items():
            for item, _ in step.inputs():
                if value in self._late:
                    wanted.append(item)
                elif item in ahead:
                    ahead[item].append(value)
        sources = [value for value in early if value not in self._steps]
        sinks = [value for value in wanted if value not in self._late]
        cut = least_cut(ahead, sources, sinks, self._carried(early), latest=False)
        if cut is None:
            raise Refused("not-carried", "padding would have to be removed from integers")
        return cut

    def _carried(self, values: Iterable[ir.Value]) -> set[ir.Value]:
        return {value for value in values if self._tokens.facts.dtype(value) in CARRIED}

    def _at_hand(self, entries: set[ir.Value]) -> set[ir.Value]:
        """The values before the attentions that are packed anyway."""
        found = set(entries)
        for item in self._needed(entries, [source.indexed.value for site in self._sites for source in site.chosen]):
            found.update(value for value in _results(item) if value not in self._late)
        return found

    def _walk_down(self, packed: set[ir.Value]) -> list[Step]:
        """The steps after the last attention that compute each token by itself, from packed tokens only."""
        needed = live(self._graph, lambda value, node: value not in self._produced and node.op_type not in ASKS_SHAPE)
        known = {step.node for step in self._steps.values()}
        tail: list[Step] = []
        for node in self._graph:
            if node not in needed or node in known or node.op_type in ASKS_SHAPE:
                continue
            first = next((item for item in node.inputs if item in self._marks and item in self._late), None)
            if first is None:
                continue
            step = read_step(node, first, self._marks[first], self._tokens)
            if isinstance(step, Reason) or not self._late.isdisjoint(step.free()):
                continue
            if all(
                self._marks.get(value) == marks and (value in self._late or value in packed) for value, marks in step.inputs()
            ):
                tail.append(step)
                for output, own in zip(node.outputs, step.outputs, strict=False):
                    self._note(output, own)
        self._live = needed
        return tail

    def _exits(self, tail: Sequence[Step]) -> tuple[set[ir.Value], dict[ir.Value, tuple[ir.Node, ...]]]:
        """The fewest values that padding is restored in, and who reads them."""
        core = [value for value in self._marks if value in self._late and (value in self._steps or value in self._produced)]
        inside = {step.node for step in (*self._steps.values(), *tail)}
        ahead: dict[ir.Value, list[ir.Value]] = {value: [] for value in core}
        for step in tail:
            for item, _ in step.inputs():
                ahead.setdefault(item, []).extend(step.node.outputs[: len(step.outputs)])
        late = [*core, *(value for step in tail for value in step.node.outputs[: len(step.outputs)])]
        outside = {value: [node for node in users(value) if node in self._live and node not in inside] for value in late}
        sinks = [value for value in late if outside[value] or value.is_graph_output()]
        cut = least_cut(ahead, core, sinks, self._carried(late), latest=True)
        if cut is None:
            raise Refused("not-carried", "padding would have to be restored in integers")
        beyond = {step.node for step in tail} - {step.node for step in self._above(cut, tail)}
        readers = {
            value: tuple(dict.fromkeys((*outside[value], *(node for node in users(value) if node in beyond)))) for value in cut
        }
        return cut, readers

    @staticmethod
    def _above(values: Iterable[ir.Value], tail: Sequence[Step]) -> list[Step]:
        makers = {output: step for step in tail for output in step.node.outputs}

        def made(values: Iterable[ir.Value]) -> Iterator[Step]:
            return (makers[value] for value in values if value in makers)

        return list(reached(made(values), lambda step: made(value for value, _ in step.inputs())))

    def _needed(self, entries: set[ir.Value], exits: Iterable[ir.Value]) -> list[Item]:
        """The steps and attentions that compute the exits from the entries, in order."""

        def makers(values: Iterable[ir.Value]) -> Iterator[Item]:
            known = (self._produced.get(value) or self._steps.get(value) for value in values if value not in entries)
            return (item for item in known if item is not None)

        return self._ordered(reached(makers(exits), lambda item: makers(value for value, _ in item.inputs())))

    def _ordered(self, items: Iterable[Item]) -> list[Item]:
        return sorted(set(items), key=lambda item: self._place[anchor(item)])


def anchor(item: Item) -> ir.Node:
    """The node of the source with the result of an item."""
    if isinstance(item, Step):
        return item.node
    return producer_of(item.result.value)


def _results(item: Item) -> Sequence[ir.Value]:
    return [item.result.value] if isinstance(item, Site) else item.node.outputs


def users(value: ir.Value) -> list[ir.Node]:
    """The nodes that read the elements of a value."""
    return [node for node, _ in value.uses() if node.op_type not in ASKS_SHAPE]


def below(values: Iterable[ir.Value], graph: ir.Graph) -> set[ir.Value]:
    """Every value that is computed from the elements of `values`, and these.

    Raises:
        Refused: A branch or body reads them.
    """
    found = set(dependents(values))
    for node in (node for value in found for node in users(value)):
        if node.graph is not graph:
            raise Refused("control-flow", "a value computed from the attentions is read in a branch", node.name)
    return found
