"""All attentions of one graph on packed tokens, those with the same padding together.

packing = Packing(scope, model, bench, court, planning)
wovens = packing.weave(wanted)       # beside the graph; what is refused is in packing.reasons
packing.connect(woven)               # in place of the graph, or packing.fork(woven, ...) behind a test
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.axes.factors import length
from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.court import Court
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep, sweep_unused
from onnx_attnfuse.guard import Guards
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.masks.walk import elements_of
from onnx_attnfuse.match.finder import anchor_of
from onnx_attnfuse.packing.after import check_after
from onnx_attnfuse.packing.marks import Tokens
from onnx_attnfuse.packing.region import Region, Site, SiteRefused, grow, read_site
from onnx_attnfuse.packing.weave import Loom, Woven, weave
from onnx_attnfuse.plan import Planning
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.rewrite import answer_shapes, check_shapes, connect, inner_values
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets import packed
from onnx_attnfuse.targets.emitted import Workbench
from onnx_attnfuse.targets.padding import KeyPadding, read_padding

_SHAPES = frozenset(["Shape", "Size"])
_PACKING = Subject("packing")


@dataclasses.dataclass(frozen=True)
class _Group:
    """Attentions with the same padding."""

    padding: KeyPadding
    sites: list[Site]
    added: tuple[ir.Node, ...]


class Packing:
    """Packs one graph."""

    def __init__(self, scope: Scope, model: ir.Model, bench: Workbench, court: Court, planning: Planning) -> None:
        self._scope = scope
        self._model = model
        self._bench = bench
        self._court = court
        self._planning = planning
        self.reasons: dict[int, Reason] = {}
        """Why attentions are not packed, by identity of what they mean."""

    @property
    def is_vouched(self) -> bool:
        """Whether padding may be taken to be on the right without a test."""
        return "right_padded" in self._planning.vouched

    def weave(self, wanted: Sequence[tuple[AttentionSpec, Meaning]], attentions: Sequence[ir.Node]) -> Iterator[Woven]:
        """Builds what can be packed beside the graph, one after the other: each is to be connected before the next.

        Args:
            wanted: The attentions that were understood.
            attentions: A node of each attention of the graph.
        """
        for group in self._groups(wanted):
            woven = self._woven(group, wanted, attentions)
            if woven is not None:
                yield woven

    def _groups(self, wanted: Sequence[tuple[AttentionSpec, Meaning]]) -> list[_Group]:
        groups: dict[object, _Group] = {}
        builder = self._bench.builder
        for spec, meaning in wanted:
            reason = packed.refuse(spec, meaning, self._bench)
            if reason is None and self._planning.padding == "exact":
                reason = Reason("not-every-batch", "packed is exact for padding on the right only, and a test is not wanted")
            if reason is not None:
                self.reasons[id(spec)] = reason
                continue
            builder.at(anchor_of(spec))
            with contained(_PACKING, spec.name, lambda: sweep_unused(builder.added)) as attempt:
                site = read_site(spec, meaning)
                padding = read_padding(spec, meaning, self._bench)
                _check_padding(padding, meaning)
                key = _padding_key(padding, meaning), length(spec.axes.b), length(spec.axes.i)
                if key in groups:
                    sweep_unused(builder.added)
                groups.setdefault(key, _Group(padding, [], tuple(builder.added))).sites.append(site)
            if attempt.reason is not None:
                self.reasons[id(spec)] = attempt.reason
        return list(groups.values())

    def _woven(
        self, group: _Group, others: Sequence[tuple[AttentionSpec, Meaning]], attentions: Sequence[ir.Node]
    ) -> Woven | None:
        """Builds a group, or notes why not."""
        with contained(_PACKING, group.sites[0].spec.name, lambda: sweep_unused(group.added)) as attempt:
            axes = group.sites[0].spec.axes
            region = self._grown(group.sites, Tokens(self._scope.facts, length(axes.b), length(axes.i)))
            check_after(region, others, attentions, self._scope.graph)
            return self._built(group, region)
        assert attempt.reason is not None
        self.reasons.update(dict.fromkeys((id(site.spec) for site in group.sites), attempt.reason))
        return None

    def _built(self, group: _Group, region: Region) -> Woven:
        """Builds a group.

        Raises:
            Refused: It is not equal, or the shape of something inside cannot be told otherwise.
        """
        inner = {*region.inner, *(value for site in region.sites for value in inner_values(site.spec))} - region.exits.keys()
        check_shapes(list(inner), self._bench.builder)
        self._bench.builder.at(anchor_of(region.sites[0].spec))
        exact = group.padding.exact("right_padded")
        return weave(region, Loom(self._bench, self._scope, self._model, self._court, group.padding, exact))

    def _grown(self, sites: list[Site], tokens: Tokens) -> Region:
        """The region around as many of `sites` as are of a sequence with itself.

        Raises:
            Refused: None is, or they cannot be packed.
        """
        try:
            return grow(sites, self._scope.graph, tokens)
        except SiteRefused as refused:
            reason, site = refused.reason, refused.site
        if len(sites) == 1:
            raise Refused(reason.code, reason.message, reason.node)
        self.reasons[id(site.spec)] = reason
        sites.remove(site)
        return self._grown(sites, tokens)

    def connect(self, woven: Woven) -> None:
        """Puts packed values in the place of the old ones and removes what became needless."""
        builder = self._bench.builder
        self._answer(woven.region)
        for old, new in woven.restored.items():
            asking = [node for node, _ in old.uses() if node.op_type in _SHAPES]
            connect(old, new, builder, [*woven.region.readers[old], *asking])
        sweep([woven.exact, *reversed(woven.region.inner), *woven.restored])

    def fork(self, woven: Woven, guards: Guards, moved: Mapping[ir.Value, ir.Value]) -> None:
        """Takes packed values where padding is on the right, else the old ones.

        Args:
            woven: What was built.
            guards: The tests of the graph.
            moved: What has taken the place of old values meanwhile.
        """
        builder = self._bench.builder
        self._answer(woven.region)
        last = next(reversed(list(builder.graph)))
        builder.at(last)
        olds = [moved.get(old, old) for old in woven.restored]
        chosen = guards.fork(woven.exact, list(woven.restored.values()), olds)
        for old, other, new in zip(woven.restored, olds, chosen, strict=True):
            connect(other, new, builder, woven.region.readers[old])

    def _answer(self, region: Region) -> None:
        """Whoever asks for the shape of an inner value gets it from elsewhere."""
        builder = self._bench.builder
        for value in _inner(region):
            answer_shapes(value, builder)


def _padding_key(padding: KeyPadding, meaning: Meaning) -> object:
    """What paddings that are the same share: what they are computed from, or what they say where each mask is computed anew."""
    if not padding.of_scores:
        return padding.keep, padding.clean
    return meaning.text, frozenset(item.value for item in elements_of(meaning.allowed))


def _check_padding(padding: KeyPadding, meaning: Meaning) -> None:
    if meaning.biases and padding.of_scores:
        raise Refused("padding-unread", "which keys are padding cannot be told from what else is added to the scores")


def _inner(region: Region) -> Iterable[ir.Value]:
    for value in (*region.inner, *(value for site in region.sites for value in inner_values(site.spec))):
        if value.graph is not None and value not in region.exits:
            yield value
