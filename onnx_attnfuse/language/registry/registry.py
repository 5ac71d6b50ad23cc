"""All patterns of a run, by what they are; rewrite rules of onnxscript among them, which `fusion.pattern_rewrites` applies."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from onnx_attnfuse.attention.match.steps import Readers, ScoreStepReader, WeightStepReader
from onnx_attnfuse.containment import Failure, Subject
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.decorators import Definition, Operator, Pattern
from onnx_attnfuse.language.matcher.discrimination_net import Net

Kind: TypeAlias = "Definition | GraphRule"
BUILT_IN = "pack builtin"
"""The owner of our own patterns."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One pattern and where it is from."""

    name: str
    grain: Kind
    owner: str
    """`pack builtin`, a file, `registered` or `given`."""

    @property
    def is_step(self) -> bool:
        """Whether the entry reads a single step."""
        return isinstance(self.grain, (ScoreStepReader, WeightStepReader))

    @property
    def is_built_in(self) -> bool:
        """Whether the entry is from the built-in pattern pack."""
        return self.owner == BUILT_IN

    @property
    def file(self) -> str | None:
        """The Python file it is written in, as tracebacks name it; None if there is none."""
        grain = self.grain
        function = grain.define if isinstance(grain, Operator) else getattr(grain, "read", None)
        if function is not None and hasattr(function, "__code__"):
            return function.__code__.co_filename
        module = sys.modules.get(grain.home.rpartition(".")[0])
        return str(pathlib.Path(self.owner).absolute()) if self.owner.endswith(".py") else getattr(module, "__file__", None)

    @property
    def subject(self) -> Subject:
        """The entry as the subject of a failure."""
        title = f"{self.kind} '{self.name}'"
        return Subject(title) if self.is_built_in else Subject(title, self.file, foreign=isinstance(self.grain, GraphRule))

    @property
    def kind(self) -> str:
        """The kind of the entry, in words."""
        if isinstance(self.grain, Pattern):
            return "refusal" if self.grain.refused else "pattern"
        if isinstance(self.grain, Operator):
            return "operator"
        if isinstance(self.grain, GraphRule):
            return "onnxscript rule"
        return "score step" if isinstance(self.grain, ScoreStepReader) else "weight step"


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Patterns, ready for use."""

    entries: tuple[Entry, ...]
    readers: Readers
    net: Net
    operators: Mapping[tuple[str, str], Operator]
    rules: tuple[GraphRule, ...]
    broken: tuple[Failure, ...] = ()
    """Installed packs that are left out, and why."""

    def is_built_in(self, name: str) -> bool:
        """Whether the pattern of this name is from the built-in pattern pack."""
        return any(entry.name == name and entry.is_built_in for entry in self.entries)

    def subject(self, name: str) -> Subject:
        """The entry of a name as the subject of a failure."""
        return next((entry.subject for entry in self.entries if entry.name == name), Subject(f"pattern '{name}'"))

    @staticmethod
    def of(entries: Iterable[Entry]) -> Catalogue:
        """A catalogue of entries.

        Raises:
            OptionError: Two have the same name, read the same operator, define it, or are the same formula.
        """
        found = tuple(entries)
        names: dict[str, Entry] = {}
        for entry in found:
            other = names.setdefault(entry.name, entry)
            if other is not entry:
                raise OptionError(
                    f"two patterns are called '{entry.name}': in {other.owner} and in {entry.owner}; rename or skip one"
                )
        grains = [entry.grain for entry in found]
        return Catalogue(
            entries=found,
            readers=Readers.of(grains),
            net=Net(grain for grain in grains if isinstance(grain, Pattern)),
            operators={(grain.domain, grain.op): grain for grain in grains if isinstance(grain, Operator)},
            rules=tuple(grain for grain in grains if isinstance(grain, GraphRule)),
        )


@dataclasses.dataclass(frozen=True)
class GraphRule:
    """Rules of onnxscript by one name: a rule, or all orders of operands that a rule set makes of it."""

    name: str
    rules: tuple[Any, ...]
    home: str


def rules_in(thing: object) -> Iterator[GraphRule]:
    """The rules that a thing is or holds: rules, rule sets, and classes of rules that are defined in it.

    Raises:
        OptionError: One wants its match made a function, which only onnxscript itself can do.
    """
    if not any(name.startswith("onnxscript.rewriter") for name in sys.modules):
        return
    found: dict[str, list[Any]] = {}
    seen: set[int] = set()
    for name, rule in _named(thing):
        if rule.as_function:
            raise OptionError(
                f"onnxscript rule '{name}' has as_function=True, which is not supported; build the nodes in rewrite"
            )
        if id(rule) not in seen:
            seen.add(id(rule))
            found.setdefault(name, []).append(rule)
    for name, rules in found.items():
        yield GraphRule(name, tuple(rules), f"{getattr(thing, '__name__', 'onnxscript')}.{name}")


def _named(thing: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(thing, types.ModuleType):
        yield from _rules_of("rule", thing)
        return
    exported: list[str] | None = getattr(thing, "__all__", None)
    held = [(name, item) for name, item in vars(thing).items() if exported is None or name in exported]
    found = [found for name, item in held if not inspect.isclass(item) for found in _rules_of(name, item)]
    yield from found
    made = {name for name, _ in found}
    for name, item in held:
        if inspect.isclass(item) and item.__module__ == thing.__name__ and item.__name__ not in made:
            yield from _rules_of(name, item)


def _rules_of(name: str, item: object) -> Iterator[tuple[str, Any]]:
    from onnxscript.rewriter import RewriteRule, RewriteRuleSet
    from onnxscript.rewriter.pattern import RewriteRuleClassBase

    if inspect.isclass(item):
        if issubclass(item, RewriteRuleClassBase) and not inspect.isabstract(item):
            yield from _rules_of(name, item.rule())
    elif isinstance(item, RewriteRuleClassBase):
        yield from _rules_of(name, type(item).rule())
    elif isinstance(item, RewriteRuleSet):
        for rule in item.rules:
            yield from _rules_of(name, rule)
    elif isinstance(item, RewriteRule):
        yield item.name or name, item
