"""All patterns as one tree, so that what they share is looked at once: a discrimination net.

A formula in normal form, read outwards in, is a row of tokens. Rows that begin alike share a branch, so the time to match a place
grows with what differs between patterns and not with their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language.decorators import Pattern
from onnx_attnfuse.language.expression import Attribute
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

Slot: TypeAlias = tuple[str, int]
"""(kind, ordinal among the slots of that kind)."""


@dataclasses.dataclass(frozen=True)
class AnOp:
    """An operator; its operands follow."""

    op: str
    attributes: tuple[tuple[str, Attribute], ...]
    count: int


@dataclasses.dataclass(frozen=True)
class AVar:
    """An operand, by the order in which operands occur."""

    index: int


@dataclasses.dataclass(frozen=True)
class ANumber:
    """A number."""

    value: float


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors of what follows."""

    slot: Slot | None
    factors: tuple[tuple[int, int], ...]
    """Operands and exponents."""
    coefficient: float


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps after the following ones."""

    slots: tuple[Slot, ...]


Token: TypeAlias = AnOp | AVar | ANumber | Factors | Steps


@dataclasses.dataclass(frozen=True)
class Variant:
    """A pattern with its alternatives chosen."""

    pattern: Pattern
    choices: Choices
    operands: tuple[str, ...]
    """Their names, by index."""
    slots: Mapping[Slot, str]
    size: int
    """Number of tokens."""

    @property
    def name(self) -> str:
        """The pattern's name with the alternatives that were taken."""
        return _called(self.pattern, self.choices)


@dataclasses.dataclass
class NetBranch:
    """A node of the discrimination net: the tokens that may come next, and the patterns that end here."""

    ops: dict[str, list[tuple[AnOp, NetBranch]]] = dataclasses.field(default_factory=dict[str, "list[tuple[AnOp, NetBranch]]"])
    others: dict[Token, NetBranch] = dataclasses.field(default_factory=dict["Token", "NetBranch"])
    turned: NetBranch | None = None
    """After an exchange of rows and columns."""
    ends: list[Variant] = dataclasses.field(default_factory=list[Variant])
    names: list[str] = dataclasses.field(default_factory=list[str])
    """The patterns after it, with their alternatives."""

    def follow(self, token: Token) -> NetBranch:
        """The branch after a token, a new one if there is none."""
        if not isinstance(token, AnOp):
            return self.others.setdefault(token, NetBranch())
        if token.op == "T":
            self.turned = self.turned or NetBranch()
            return self.turned
        found = self.ops.setdefault(token.op, [])
        for other, branch in found:
            if other == token:
                return branch
        found.append((token, NetBranch()))
        return found[-1][1]

    def expected(self) -> Iterator[str]:
        """The tokens that may come next, in words."""
        yield from self.ops
        for token, branch in self.others.items():
            if isinstance(token, ANumber):
                yield f"{token.value:g}"
            elif isinstance(token, (Factors, Steps)):
                yield from branch.expected()
        if self.turned is not None:
            yield from self.turned.expected()


def _called(pattern: Pattern, choices: Choices) -> str:
    taken = ", ".join(f"{choice}={name}" for choice, name in choices.items())
    return f"{pattern.name}({taken})" if taken else pattern.name


class _Row:
    """The tokens of one formula."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.operands: list[str] = []
        self.slots: dict[str, Slot] = {}

    def add(self, form: Form) -> None:
        match form:
            case Var(name):
                self.tokens.append(AVar(self._operand(name)))
            case Literal(value):
                self.tokens.append(ANumber(value))
            case Op(op, attributes, args):
                self.tokens.append(AnOp(op, attributes, len(args)))
                for arg in args:
                    self.add(arg)
            case FactorProduct(slot, factors, coefficient, core):
                taken = None if slot is None else self._slot(slot)
                self.tokens.append(Factors(taken, tuple((self._operand(name), sign) for name, sign in factors), coefficient))
                self.add(core)
            case Slotted(slots, core):
                self.tokens.append(Steps(tuple(sorted(map(self._slot, slots)))))
                self.add(core)

    def _operand(self, name: str) -> int:
        if name not in self.operands:
            self.operands.append(name)
        return self.operands.index(name)

    def _slot(self, name: str) -> Slot:
        kind = kind_of(name) or ""
        return self.slots.setdefault(name, (kind, sum(taken == kind for taken, _ in self.slots.values())))


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
        row = _Row()
        row.add(form)
        branch = self.root
        for token in row.tokens:
            branch = branch.follow(token)
            branch.names.append(_called(pattern, choices))
        for other in branch.ends:
            if other.pattern is not pattern and other.pattern.priority == pattern.priority:
                homes = f"{other.pattern.home} and {pattern.home}"
                raise OptionError(f"two patterns are the same formula: {homes}; skip one of them or give one a higher priority")
        slots = {slot: name for name, slot in row.slots.items()}
        branch.ends.append(Variant(pattern, choices, tuple(row.operands), slots, len(row.tokens)))
