"""All patterns as one tree, so that what they share is looked at once: a discrimination net.

A formula in normal form, read outwards in, is a row of tokens. Rows that begin alike share a branch, so the time to match a place
grows with what differs between patterns and not with their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.decorators import Pattern
from onnx_attnfuse.language.normal_form import (
    Choices,
    FactorProduct,
    Form,
    Literal,
    Op,
    Slotted,
    Var,
    equivalents,
    kind_of,
    normal,
    variants,
)

_OPERAND: Form = Var("")
"""An operand of a token: the tokens of it follow."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A pattern with its alternatives chosen."""

    pattern: Pattern
    choices: Choices
    names: Mapping[str, str]
    """The names of its operands and slots, by those in tokens."""
    size: int
    """Number of tokens."""

    @property
    def name(self) -> str:
        """The pattern's name with the alternatives that were taken."""
        return _called(self.pattern, self.choices)


@dataclasses.dataclass
class NetBranch:
    """A node of the discrimination net: the tokens that may come next, and the patterns that end here."""

    ops: dict[str, dict[Op, NetBranch]] = dataclasses.field(default_factory=dict[str, "dict[Op, NetBranch]"])
    others: dict[Form, NetBranch] = dataclasses.field(default_factory=dict["Form", "NetBranch"])
    turned: NetBranch | None = None
    """After an exchange of rows and columns."""
    ends: list[Variant] = dataclasses.field(default_factory=list[Variant])
    names: list[str] = dataclasses.field(default_factory=list[str])
    """The patterns after it, with their alternatives."""

    def follow(self, token: Form) -> NetBranch:
        """The branch after a token, a new one if there is none."""
        if not isinstance(token, Op):
            return self.others.setdefault(token, NetBranch())
        if token.op == "T":
            self.turned = self.turned or NetBranch()
            return self.turned
        return self.ops.setdefault(token.op, {}).setdefault(token, NetBranch())

    def expected(self) -> Iterator[str]:
        """The tokens that may come next, in words."""
        yield from self.ops
        for token, branch in self.others.items():
            if isinstance(token, Literal):
                yield f"{token.value:g}"
            elif isinstance(token, (FactorProduct, Slotted)):
                yield from branch.expected()
        if self.turned is not None:
            yield from self.turned.expected()


def _called(pattern: Pattern, choices: Choices) -> str:
    taken = ", ".join(f"{choice}={name}" for choice, name in choices.items())
    return f"{pattern.name}({taken})" if taken else pattern.name


class _Row:
    """The tokens of one formula: its parts, each without its operands, which follow; names are numbers in order."""

    def __init__(self, form: Form) -> None:
        self._numbers: dict[str, str] = {}
        self.tokens = list(self._of(form))
        self.names = {number: name for name, number in self._numbers.items()}

    def _of(self, form: Form) -> Iterator[Form]:
        match form:
            case Var(name):
                yield Var(self._number(name))
            case Literal():
                yield form
            case Op(_, _, args):
                yield dataclasses.replace(form, args=(_OPERAND,) * len(args))
                for arg in args:
                    yield from self._of(arg)
            case FactorProduct(slot, factors, coefficient, core):
                taken = None if slot is None else self._number(slot)
                named = tuple((self._number(name), sign) for name, sign in factors)
                yield FactorProduct(taken, named, coefficient, _OPERAND)
                yield from self._of(core)
            case Slotted(slots, core):
                yield Slotted(tuple(sorted(map(self._number, slots))), _OPERAND)
                yield from self._of(core)

    def _number(self, name: str) -> str:
        """The name of an operand or slot in tokens; that of a slot says its kind, too."""
        kind = kind_of(name)
        return self._numbers.setdefault(name, f"{kind or ''}{sum(kind_of(other) == kind for other in self._numbers)}")


class Net:
    """Patterns, ready to be looked for."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        """Builds the net.

        Raises:
            OptionError: Two patterns are the same formula.
        """
        self.root = NetBranch()
        self.patterns = tuple(patterns)
        for pattern in self.patterns:
            for choices, formula in variants(pattern.written):
                for form in equivalents(normal(formula)):
                    self._insert(pattern, choices, form)
        self.begins = frozenset(self.root.ops)
        """Operators that a formula begins with."""
        self.begins_with_steps = bool(self.root.others)
        """Whether one begins with factors or masks."""

    def _insert(self, pattern: Pattern, choices: Choices, form: Form) -> None:
        row, branch = _Row(form), self.root
        for token in row.tokens:
            branch = branch.follow(token)
            branch.names.append(_called(pattern, choices))
        for other in branch.ends:
            if other.pattern is not pattern and other.pattern.priority == pattern.priority:
                homes = f"{other.pattern.home} and {pattern.home}"
                raise OptionError(f"two patterns are the same formula: {homes}; skip one of them or give one a higher priority")
        branch.ends.append(Variant(pattern, choices, row.names, len(row.tokens)))
