"""Verified rewrites of one graph: new nodes are built beside the old ones, verified and connected, or swept away.

    graph = GraphContext(scope, model, builder, verifier)
    with graph.rewrite(node, Subject("rewriting a sum")) as edit:   # new nodes go right before `node`
        new = graph.builder.elementwise("Add", ...)
        edit.replace([(node.outputs[0], new)], frontier)            # verified and connected; unused nodes are removed
    if edit.reason is not None: ...                                 # refused, or failed and reported

Until something is connected nothing that stood in the graph has changed: a refusal or a failure costs this place only, and what
was built for it goes. A failure after that goes on to whoever can put the whole graph back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from types import TracebackType

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.containment import Attempt, Subject
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import connect
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep, sweep_unused, take_back
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.verify.verdict import Verified
from onnx_attnfuse.verify.verifier import Verifier


@dataclasses.dataclass(frozen=True)
class GraphContext:
    """One graph that is rewritten, the builder of its new nodes, and their verifier."""

    scope: Scope
    model: ir.Model
    """The model that the graph belongs to, for its functions."""
    builder: Builder
    verifier: Verifier

    def rewrite(self, at: ir.Node | None, subject: Subject, place: str | None = None) -> Edit:
        """A rewrite at one place; enter it by `with`.

        Args:
            at: New nodes go right before this one; None at the builder's position.
            subject: The subject of a failure.
            place: The name of the place, by default that of `at`.
        """
        return Edit(self, at, subject, label(at) if place is None and at is not None else place)

    def verify(
        self,
        pairs: Sequence[tuple[ir.Value, ir.Value]],
        frontier: Sequence[ir.Value],
        name: str,
        given: ir.Value | None = None,
        empty: frozenset[str] = frozenset(),
        *,
        doubted: bool = False,
    ) -> Verified | None:
        """Verifies new values against old ones; see `Verifier.check`.

        Raises:
            Refused: A value differs, or could not be shown equal.
        """
        return self.verifier.check(pairs, frontier, name, self.scope, self.model, given, empty, doubted=doubted)

    def check_mask(self, spec: AttentionSpec, meaning: Meaning) -> Meaning:
        """The meaning of a mask, verified; see `Verifier.check_mask`."""
        return self.verifier.check_mask(spec, meaning, self.scope, self.model)


class Edit(Attempt):
    """One rewrite at one place; nodes built in it that are unused when it ends are removed."""

    def __init__(
        self, graph: GraphContext, at: ir.Node | None, subject: Subject, place: str | None, whole: Edit | None = None
    ) -> None:
        super().__init__(subject, place, None)
        self._graph, self._at, self._place = graph, at, place
        self._whole = whole or self
        self._keeps = self._is_connected = False
        self._start, self._constants = 0, 0
        self._before: tuple[ir.Node | None, list[ir.Node], list[ir.Value]] = None, [], []
        self.verified: Verified | None = None
        """The verdict on what was replaced; None where verification is off."""

    def __enter__(self) -> Edit:
        builder = self._graph.builder
        self._before = builder.anchor, builder.added, builder.constants
        if self._whole is self:
            builder.added, builder.constants = [], []
        self._start, self._constants = len(builder.added), len(builder.constants)
        if self._at is not None:
            builder.at(self._at)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        builder = self._graph.builder
        is_undone = not self._whole._is_connected and super().__exit__(kind, error, trace)
        if is_undone:
            take_back(self.added, builder.constants[self._constants :])
            del builder.added[self._start :], builder.constants[self._constants :]
        elif error is None and self._whole is self and not self._keeps:
            sweep_unused(self.added)
            take_back((), builder.constants)
        builder.anchor, added, constants = self._before
        if self._whole is self:
            builder.added, builder.constants = added, constants
        return is_undone

    @property
    def added(self) -> list[ir.Node]:
        """The nodes built in this rewrite so far."""
        return self._graph.builder.added[self._start :]

    def part(self, subject: Subject, place: str | None = None) -> Edit:
        """A part of the rewrite that is refused or fails by itself; otherwise its nodes are the whole rewrite's."""
        return Edit(self._graph, None, subject, self._place if place is None else place, self._whole)

    def own(self, value: ir.Value) -> ir.Value:
        """A value that was built in this rewrite, or else a copy: a replacement value has no other role."""
        if value.producer() in self.added:
            return value
        facts = self._graph.scope.facts
        return self._graph.builder.node(
            "Identity", [value], dims=facts.dims(value), dtype=facts.dtype(value), hint="attnfuse/same"
        )

    def adopt(self, nodes: Iterable[ir.Node], constants: Iterable[ir.Value] = ()) -> None:
        """Takes in nodes that were built elsewhere, in graph order, and initializers; they go with the rewrite."""
        self._graph.builder.added += nodes
        self._graph.builder.constants += constants

    def keep(self) -> tuple[tuple[ir.Node, ...], tuple[ir.Value, ...]]:
        """Lets what was built stay beside the graph until another rewrite adopts it; returns the nodes and initializers."""
        self._keeps = True
        return tuple(self.added), tuple(self._graph.builder.constants)

    def replace(self, pairs: Sequence[tuple[ir.Value, ir.Value]], frontier: Sequence[ir.Value], name: str | None = None) -> None:
        """Verifies new values, puts them in the place of old ones, and removes what became needless.

        Args:
            pairs: Old values, each with its new one.
            frontier: The values that both are computed from.
            name: The name of the rewrite in the evidence, by default that of the place.

        Raises:
            Refused: A value differs, or could not be shown equal.
        """
        self.verified = self._graph.verify(pairs, frontier, name or self._place or "")
        self.connect(pairs)
        sweep([old for old, _ in pairs])

    def connect(self, pairs: Iterable[tuple[ir.Value, ir.Value]], users: Iterable[ir.Node] | None = None) -> None:
        """Gives users of old values the new ones, which must have been verified; from here on nothing is undone.

        Args:
            pairs: Old values, each with its new one.
            users: The nodes that get the new values; None: all but those built in this rewrite.
        """
        self._whole._is_connected = True
        for old, new in pairs:
            connect(old, new, self._graph.builder, [user for user, _ in old.uses()] if users is None else users)
