"""Rewrite rules of onnxscript found in a module and taken as entries of the registry; `fusion.pattern_rewrites` applies them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from onnx_attnfuse.errors import OptionError


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
