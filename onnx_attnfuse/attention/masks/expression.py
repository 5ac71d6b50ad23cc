"""Masks as expressions over index variables.

An element of a mask is a function of its place. Integers are linear forms over indices and read elements, with sizes as
coefficients, so that `j - i <= 0` looks the same however it was written; truth values are comparisons of such forms, reads, and
their combinations; floats are numbers, choices between numbers, and terms nobody needs to look into.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.ops import COMPARES, LOGICAL
from onnx_attnfuse.graph.sizes import Dim


@dataclasses.dataclass(frozen=True)
class Index:
    """A variable that runs over `range(factor.size)`."""

    factor: Factor


@dataclasses.dataclass(frozen=True)
class Element:
    """The element of a value at an index, where the value is data: an input, a constant table, or an unread value."""

    value: ir.Value
    at: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True)
class Linear:
    """`offset + sum of coefficient · atom`, over integers."""

    terms: tuple[tuple[Index | Element, Dim], ...]
    offset: Dim = 0


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that is no index."""

    value: float


@dataclasses.dataclass(frozen=True)
class Truth:
    """True or false everywhere."""

    value: bool


@dataclasses.dataclass(frozen=True)
class Compare:
    """`form <= 0` or `form == 0`."""

    form: Linear
    equal: bool = False


@dataclasses.dataclass(frozen=True)
class NonZero:
    """A read element is not zero (or is true)."""

    element: Element


@dataclasses.dataclass(frozen=True)
class Not:
    """The opposite."""

    inner: Expression


@dataclasses.dataclass(frozen=True)
class And:
    """All of several."""

    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True)
class Or:
    """At least one of several."""

    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """`chosen` where `condition` holds, else `other`."""

    condition: Expression
    chosen: Expression
    other: Expression


@dataclasses.dataclass(frozen=True)
class Apply:
    """An element-wise operator that is not looked into."""

    op: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = "Linear | Element | Number | Truth | Compare | NonZero | Not | And | Or | Choice | Apply"

TRUE, FALSE = Truth(True), Truth(False)
_TRUTHS = COMPARES | LOGICAL


def index(factor: Factor) -> Linear:
    """The variable of a factor."""
    return Linear(((Index(factor), 1),))


def constant(dim: Dim) -> Linear:
    """A size as an expression."""
    return Linear((), dim)


def combine(left: Linear, right: Linear, sign: int = 1) -> Linear:
    """`left + sign · right`."""
    terms: dict[Index | Element, Dim] = dict(left.terms)
    for atom, coefficient in right.terms:
        terms[atom] = terms.get(atom, 0) + coefficient * sign
    kept = sorted(((atom, c) for atom, c in terms.items() if c != 0), key=lambda term: _rank(term[0]))
    return Linear(tuple(kept), left.offset + right.offset * sign)


def _rank(atom: Index | Element) -> tuple[int, int, str]:
    return (0, atom.factor.serial, "") if isinstance(atom, Index) else (1, 0, str(atom.value.name))


def scaled(form: Linear, factor: Dim) -> Linear:
    """`factor · form`."""
    if factor == 0:
        return constant(0)
    return Linear(tuple((atom, coefficient * factor) for atom, coefficient in form.terms), form.offset * factor)


def bounds(form: Linear) -> tuple[Dim | None, Dim | None]:
    """The smallest and largest value of a form; None where a read element makes it unknown."""
    low: Dim | None = form.offset
    high: Dim | None = form.offset
    for atom, coefficient in form.terms:
        if isinstance(atom, Element):
            return None, None
        reach = coefficient * (atom.factor.size - 1)
        positive = _at_least(coefficient, 0)
        if not positive and not _at_least(coefficient * -1, 0):
            return None, None
        low, high = (low, high + reach) if positive else (low + reach, high)
    return low, high


def _at_least(left: Dim, right: Dim) -> bool:
    """Whether `left >= right` whatever the symbols are; any may be 0, as a past is in the first step."""
    gap = left - right
    return sizes.least(gap, sizes.symbols(gap)) >= 0


def at_most_zero(form: Linear) -> Expression:
    """`form <= 0`, decided where it can be."""
    low, high = bounds(form)
    if high is not None and _at_least(0, high):
        return TRUE
    if low is not None and _at_least(low, 1):
        return FALSE
    return Compare(form)


def is_zero(form: Linear) -> Expression:
    """`form == 0`, decided where it can be."""
    if not form.terms and isinstance(form.offset, int):
        return Truth(form.offset == 0)
    low, high = bounds(form)
    if (low is not None and _at_least(low, 1)) or (high is not None and _at_least(-1, high)):
        return FALSE
    if len(form.terms) == 1 and form.offset == 0 and isinstance(form.terms[0][0], Element):
        return Not(NonZero(form.terms[0][0]))
    return Compare(form, equal=True)


def negation(part: Expression) -> Expression:
    """The opposite of a truth value, negations pushed inwards."""
    match part:
        case Truth(value):
            return Truth(not value)
        case Not(inner):
            return inner
        case Compare(form, False):
            return at_most_zero(combine(constant(1), form, -1))
        case And(parts):
            return disjunction(map(negation, parts))
        case Or(parts):
            return conjunction(map(negation, parts))
        case _:
            return Not(part)


def conjunction(parts: Iterable[Expression]) -> Expression:
    """All of `parts`, flattened; parts that are always true are dropped."""
    found: dict[Expression, None] = {}
    for part in parts:
        for item in part.parts if isinstance(part, And) else (part,):
            if item == FALSE:
                return FALSE
            if item != TRUE:
                found[item] = None
    kept = tuple(found)
    return TRUE if not kept else kept[0] if len(kept) == 1 else And(kept)


def disjunction(parts: Iterable[Expression]) -> Expression:
    """Any of `parts`, flattened; parts that are never true, or implied by others, are dropped."""
    found: dict[Expression, None] = {}
    for part in parts:
        for item in part.parts if isinstance(part, Or) else (part,):
            if item == TRUE:
                return TRUE
            if item != FALSE:
                found[item] = None
    kept = tuple(found)
    shorter = tuple(_where_others_fail(part, kept) for part in kept)
    if shorter != kept:
        return disjunction(shorter)
    kept = tuple(part for part in kept if not any(_implies(part, other) for other in kept if other is not part))
    return FALSE if not kept else kept[0] if len(kept) == 1 else Or(kept)


def _where_others_fail(part: Expression, others: Sequence[Expression]) -> Expression:
    """`a or (not a and b)` is `a or b`: a part without what holds wherever one of the others does not."""
    if not isinstance(part, And):
        return part
    failing = [negation(other) for other in others if isinstance(other, Compare)]
    return conjunction(item for item in part.parts if not any(_implies(fails, item) for fails in failing))


def _implies(one: Expression, other: Expression) -> bool:
    """Whether the second holds wherever the first does: it is the same, or a comparison of no more."""
    if one == other:
        return True
    if not isinstance(one, Compare) or not isinstance(other, Compare) or one.equal or other.equal:
        return False
    _, high = bounds(combine(other.form, one.form, -1))
    return high is not None and _at_least(0, high)


def choice(condition: Expression, chosen: Expression, other: Expression) -> Expression:
    """`chosen` or `other`, decided where the condition is."""
    if isinstance(condition, Truth):
        return chosen if condition.value else other
    return other if chosen == other else Choice(condition, chosen, other)


def truth(part: Expression) -> Expression:
    """A number as a truth value: not zero."""
    match part:
        case Element():
            return NonZero(part)
        case Linear():
            return negation(is_zero(part))
        case Number(value):
            return Truth(value != 0)
        case Choice(condition, chosen, other):
            return disjunction([conjunction([condition, truth(chosen)]), conjunction([negation(condition), truth(other)])])
        case Apply("Mul", arguments):
            return conjunction(map(truth, arguments))
        case Apply() if not is_truth(part):
            return Not(Apply("Equal", (part, Number(0.0))))
        case _:
            return part


def is_truth(part: Expression) -> bool:
    """Whether an expression is true or false, and no number."""
    return isinstance(part, (Truth, Compare, NonZero, Not, And, Or)) or (isinstance(part, Apply) and part.op in _TRUTHS)


def zero_or(part: Expression) -> float | None:
    """The one number that a number certainly is where it is not 0; 1 for a truth value, None if that is not known."""
    numbers = {1.0} if is_binary(part) else _numbers(part) - {0.0}
    return numbers.pop() if len(numbers) == 1 and math.isfinite(min(numbers)) else None


def _numbers(part: Expression) -> set[float]:
    """All numbers that a choice is among; none known, and more than one, where it is something else."""
    if isinstance(part, Choice):
        return _numbers(part.chosen) | _numbers(part.other)
    return {part.value} if isinstance(part, Number) else {math.nan, math.inf}


def is_binary(part: Expression) -> bool:
    """Whether a number is certainly 0 or 1."""
    match part:
        case Choice(_, chosen, other):
            return is_binary(chosen) and is_binary(other)
        case Number(value):
            return value in {0.0, 1.0}
        case Linear(terms, offset):
            return not terms and offset in {0, 1}
        case _:
            return is_truth(part)
