"""Undoable rewrites: new nodes are built, verified and connected, and the old ones put back where the rewrite was of no use.

Statistics count how often each pattern was tried, how often it led to something, and how long it took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import onnx_ir as ir

from onnx_attnfuse.attention.match.steps import Readers
from onnx_attnfuse.containment import FAILED, Subject, failed
from onnx_attnfuse.graph.edit import put_back
from onnx_attnfuse.graph.sweep import Detached, detach, sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.language.matcher.replacement import Replacement
from onnx_attnfuse.language.registry.registry import Catalogue
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.verdict import Verified, together

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


@dataclasses.dataclass
class Tried:
    """One attempt."""

    hit: bool = False


@dataclasses.dataclass
class Count:
    """All attempts of one pattern."""

    tries: int = 0
    hits: int = 0
    seconds: float = 0.0


class PatternStatistics:
    """Tries, hits and time of every pattern in one run."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}

    @contextlib.contextmanager
    def trying(self, name: str) -> Generator[Tried]:
        """Counts and times one attempt; the caller says whether it was a hit."""
        tried, started = Tried(), time.perf_counter()
        try:
            yield tried
        finally:
            self._note(name, tried.hit, started)

    def _note(self, name: str, hit: bool, started: float) -> None:
        count = self.counts.setdefault(name, Count())
        count.tries += 1
        count.hits += hit
        count.seconds += time.perf_counter() - started

    def counting(self, readers: Readers, subject: Callable[[str], Subject], doubted: set[ir.Node]) -> Readers:
        """Readers whose calls are counted; a failure counts as a refusal and is reported.

        Args:
            readers: The readers.
            subject: The subject of failures of a pattern, by its name.
            doubted: Takes the nodes that readers which are not built in have read.
        """
        scores = {
            key: dataclasses.replace(entry, read=self._counted(entry.name, entry.read, subject(entry.name), doubted))
            for key, entry in readers.scores.items()
        }
        weights = {
            key: dataclasses.replace(entry, read=self._counted(entry.name, entry.read, subject(entry.name), doubted))
            for key, entry in readers.weights.items()
        }
        return Readers(scores, weights)

    def _counted(
        self, name: str, read: Callable[Concatenate[ir.Node, _Arguments], _Answer], subject: Subject, doubted: set[ir.Node]
    ) -> Callable[Concatenate[ir.Node, _Arguments], _Answer]:
        def counted(node: ir.Node, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            started = time.perf_counter()
            try:
                found = read(node, *args, **kwargs)
            except Refused:
                raise
            except Exception as error:
                reason = failed(error, subject, label(node))
                raise Refused(reason.code, reason.message, reason.node) from error
            self._note(name, bool(found), started)
            if found and subject.file is not None:
                doubted.add(node)
            return found

        return counted


@dataclasses.dataclass(frozen=True)
class UndoableRewrite:
    """One rewrite that was connected, with all that is needed to undo it."""

    pattern: str
    stood: str
    """The name of the Softmax that stood there, or else of the node."""
    old: ir.Value
    new: ir.Value
    softmaxes: tuple[ir.Node, ...]
    """The new ones."""
    removed: Detached
    judged: bool
    """Whether it was compared with the old nodes."""
    verified: Verified | None = None
    """The verdict on that; None where verification is off."""

    @property
    def was_useful(self) -> bool:
        """Whether every Softmax it introduced was fused; without one: whether a fused operator absorbed the result."""
        if self.softmaxes:
            return all(node.graph is None for node in self.softmaxes)
        return not self.new.uses() and not self.new.is_graph_output()


@dataclasses.dataclass
class PatternRewriter:
    """Applies the rewrites of all patterns to one graph, and undoes those that were of no use."""

    graph: GraphContext
    catalogue: Catalogue
    statistics: PatternStatistics
    keep_outputs: bool
    done: list[UndoableRewrite] = dataclasses.field(default_factory=list[UndoableRewrite])
    undone: list[UndoableRewrite] = dataclasses.field(default_factory=list[UndoableRewrite])
    """The rewrites among `done` that were undone."""
    refused: dict[str, Reason] = dataclasses.field(default_factory=dict[str, Reason])
    """Why something was left, by the name of its Softmax, or else of the node."""
    spoken: dict[str, Reason] = dataclasses.field(default_factory=dict[str, Reason])
    """Why places without a Softmax are no fused attention, by the name of the node: formulas that are refused, and operators of
    other domains whose definition cannot be used."""
    kind_of: Callable[[ir.Node], str | None] = lambda node: None
    """The kind of mask of the attention at a Softmax, if it can be planned as it is."""
    needless: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Patterns that were put back where plain attention does without, by the name of the Softmax."""
    named: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Patterns that merely name sites fused anyway, by the name of the Softmax."""

    def attempt(
        self,
        node: ir.Node,
        name: str,
        make: Callable[[], Replacement],
        softmaxes: Sequence[ir.Node] = (),
        taken: str | None = None,
    ) -> bool:
        """Writes one place anew; the reason against it is noted.

        Args:
            node: The node that gives the old result.
            name: The pattern's name.
            make: Makes the new nodes, or raises `Refused`.
            softmaxes: The Softmax nodes there.
            taken: The name with the alternatives that were taken, for people.
        """
        pattern = taken or name
        old, places = node.outputs[0], [label(item) for item in softmaxes or (node,)]
        kinds = [self.kind_of(item) for item in softmaxes]
        with self.graph.rewrite(node, self.catalogue.subject(name)) as edit:
            made = make()
            new = edit.own(made.new)
            verified = None
            if made.judged:
                doubted = not self.catalogue.is_built_in(name)
                verified = self.graph.verify([(old, new)], made.frontier, node.name or pattern, doubted=doubted)
            larger = len(edit.added) >= made.replaced
            edit.connect([(old, new)])
            change = UndoableRewrite(pattern, places[0], old, new, made.softmaxes, detach([old]), made.judged, verified)
            if softmaxes and larger and self._is_needless(kinds, made.softmaxes) and self._put_back(change, {}):
                self.undone.remove(change)
                self.needless[places[0]] = name
                return False
            self.done.append(change)
            return True
        reason = edit.reason
        assert reason is not None
        if reason.code not in FAILED:
            reason = dataclasses.replace(reason, message=f"pattern '{pattern}': {reason.message}")
        (self.refused if softmaxes else self.spoken).update(dict.fromkeys(places, reason))
        return False

    def _is_needless(self, before: Sequence[str | None], softmaxes: Sequence[ir.Node]) -> bool:
        """Whether the old nodes can be fused as they were, and masks are no simpler now."""
        if None in before:
            return False
        after = [self.kind_of(node) for node in softmaxes]
        return len(after) > len(before) or None in after or Counter(before) == Counter(after)

    def finish(self, sites: Iterable[SiteReport], replaced: Mapping[ir.Value, ir.Value]) -> list[SiteReport]:
        """Puts back rewrites that led nowhere, and reports the sites by the names that they had.

        Args:
            sites: The reports, in which places have the names of the new nodes.
            replaced: Values that the fused operators replaced, with their replacements.
        """
        back = dict(replaced)
        undone: set[str] = set()
        for change in self.done:
            if not change.was_useful and self._put_back(change, back):
                undone.update(map(label, change.softmaxes))
            sweep(value for _, inputs in change.removed.nodes for value in inputs)
        reported = [self._reported(site, undone) for site in sites]
        return reported + [
            SiteReport(name, self.graph.scope.path, "skipped", reasons=(reason,)) for name, reason in self.spoken.items()
        ]

    def notes(self, sites: Iterable[SiteReport]) -> list[str]:
        """Notes on patterns that could not be applied at places that are no sites, and on definitions that were believed."""
        reported = {site.name: site for site in sites}
        names = reported.keys()
        needless = Counter(pattern for name, pattern in self.needless.items() if name in names and reported[name].is_rewritten)
        first = {pattern: name for name, pattern in reversed(self.needless.items())}
        believed = Counter(change.pattern for change in self.done if not change.judged and change not in self.undone)
        return [
            *(
                f"pattern '{pattern}' at {first[pattern]}{f' and {count - 1} more' if count > 1 else ''}: put back, "
                "plain attention is fused without it"
                for pattern, count in needless.items()
            ),
            *(str(reason) for name, reason in self.refused.items() if _is_unreported(reason, reported.get(name))),
            *(
                f"{count} {name} taken by their definition, which was compared with no reference"
                for name, count in believed.items()
            ),
        ]

    def _put_back(self, change: UndoableRewrite, replaced: dict[ir.Value, ir.Value]) -> bool:
        """Puts the old nodes back, if everything that they read is still there; else the new ones stay, which are equal."""
        nodes = ((node, tuple(_latest(value, replaced) for value in values)) for node, values in change.removed.nodes)
        if not put_back(change.old, change.new, Detached(tuple(nodes)), self.graph.builder):
            return False
        replaced[change.new] = change.old
        self.undone.append(change)
        return True

    def _reported(self, site: SiteReport, undone: Collection[str]) -> SiteReport:
        """The report on a site under the name that stood in the model."""
        for change in self.done:
            names = [label(node) for node in change.softmaxes]
            if site.name not in names:
                continue
            count = f" ({names.index(site.name) + 1} of {len(names)})" if len(names) > 1 else ""
            verified = together(site.verified, change.verified)
            reported = dataclasses.replace(site, name=change.stood + count, pattern=change.pattern, verified=verified)
            if site.name not in undone or not site.is_rewritten:
                return reported
            reason = Reason("part-unfused", f"another part of '{change.pattern}' could not be fused")
            return dataclasses.replace(
                reported, status="skipped", op=None, domain=None, kernel=None, verified=None, reasons=(reason,)
            )
        reason = self.refused.get(site.name)
        if reason is not None and site.status == "already-fused":
            return dataclasses.replace(site, reasons=(reason, *site.reasons))
        if reason is not None and site.status in {"skipped", "not-attention"}:
            return dataclasses.replace(site, status="skipped", reasons=(reason, *site.reasons))
        return dataclasses.replace(site, pattern=self.named.get(site.name))


def _is_unreported(reason: Reason, site: SiteReport | None) -> bool:
    """Whether no site and no failure reports why a pattern was not applied; that it is wrong is worth a line in any case."""
    return reason.code not in FAILED and (site is None or (reason.code == "differs" and site.is_rewritten))


def _latest(value: ir.Value | None, replaced: Mapping[ir.Value, ir.Value]) -> ir.Value | None:
    while value is not None and value in replaced:
        value = replaced[value]
    return value
