"""The normal form of a formula: alternatives chosen, factors gathered, and slots where a graph may have anything of a kind.

`scale * (q @ k.T) + mask` and `(q @ k.T) / 8 - bias` are one thing to a graph: a product with steps after it. Therefore the
operands that a formula multiplies and adds are brought into two forms, `FactorProduct` and `Slotted`, and everything else stays
an operator on operands.

Formulas that are the same in other operators become alternatives, so an author writes one of them:

    log(sum(exp(x)))                   ReduceLogSumExp, or with the maximum taken out: max(x) + log(sum(exp(x - max(x))))
    log(sum(x))                        ReduceLogSum
    sum(x * x), sqrt(sum(x * x))       ReduceSumSquare, ReduceL2
    sum(absolute(x))                   ReduceL1
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from onnx_attnfuse.language.expression import Attribute, Tensor, number

_SLOT = re.compile(r"(scale|mask)\d*")
_MAX_VARIANTS = 64
COMMUTATIVE = frozenset("Add And Equal Max Min Mul Or".split())


@dataclasses.dataclass(frozen=True)
class Var:
    """An operand."""

    name: str


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number."""

    value: float


@dataclasses.dataclass(frozen=True)
class Op:
    """An operator on operands."""

    op: str
    attributes: tuple[tuple[str, Attribute], ...]
    args: tuple[Form, ...]


@dataclasses.dataclass(frozen=True)
class FactorProduct:
    """`coefficient · factors · core`; a slot among them takes every factor that is left."""

    slot: str | None
    factors: tuple[tuple[str, int], ...]
    """Operands and their exponents, 1 or -1."""
    coefficient: float
    core: Form


@dataclasses.dataclass(frozen=True)
class Slotted:
    """`core`, then whatever the slots take: scalings, masks."""

    slots: tuple[str, ...]
    core: Form


Form: TypeAlias = Var | Literal | Op | FactorProduct | Slotted
Choices: TypeAlias = Mapping[str, str]
"""The alternative of each choice."""


def kind_of(name: str) -> str | None:
    """`scale` or `mask` for an operand that is a slot."""
    found = _SLOT.fullmatch(name)
    return found.group(1) if found else None


def variants(tensor: Tensor, chosen: Choices | None = None) -> Iterator[tuple[Choices, Tensor]]:
    """The formula once for each combination of its alternatives; a choice that occurs twice is the same in both places."""
    chosen = chosen or {}
    if tensor.op == "AnyOf":
        choice, names = tensor.name, str(tensor.attribute("names")).split()
        for name, arg in zip(names, tensor.args, strict=True):
            if chosen.get(choice, name) == name:
                yield from variants(arg, {**chosen, choice: name})
        return
    if not tensor.args:
        yield chosen, tensor
        return
    for choices, args in _variants_of(tensor.args, chosen):
        yield choices, dataclasses.replace(tensor, args=args)


def _variants_of(tensors: Sequence[Tensor], chosen: Choices) -> Iterator[tuple[Choices, tuple[Tensor, ...]]]:
    if not tensors:
        yield chosen, ()
        return
    for choices, first in variants(tensors[0], chosen):
        for all_choices, rest in _variants_of(tensors[1:], choices):
            yield all_choices, (first, *rest)


def too_many(tensor: Tensor) -> bool:
    """Whether there are more combinations of alternatives than anyone would write."""
    return any(count >= _MAX_VARIANTS for count, _ in enumerate(variants(tensor)))


def normal(tensor: Tensor) -> Form:
    """The normal form of a formula without alternatives."""
    if tensor.op == "Variable":
        return Var(tensor.name)
    if tensor.op == "Number":
        return Literal(tensor.value)
    if tensor.op in {"Mul", "Div", "Neg"}:
        return _product(tensor)
    if tensor.op in {"Add", "Sub"}:
        return _sum(tensor)
    if tensor.op == "Pow" and tensor.args[1] == number(2):
        return Op("Mul", (), (normal(tensor.args[0]),) * 2)
    return Op(tensor.op, tensor.attributes, tuple(map(normal, tensor.args)))


def plain(tensor: Tensor) -> Form:
    """The form of a definition, where every operand is what it is."""
    if tensor.op in {"Variable", "Number"}:
        return normal(tensor)
    return Op(tensor.op, tensor.attributes, tuple(map(plain, tensor.args)))


def _sum(tensor: Tensor) -> Form:
    left, right = tensor.args
    for slot, other in ((right, left), (left, right)):
        if _slot(slot) == "mask" and (tensor.op == "Add" or slot is right):
            return _slotted(slot.name, normal(other))
    return Op(tensor.op, (), (normal(left), normal(right)))


def _slotted(slot: str, inner: Form) -> Form:
    """A slot around its operand, together with slots that are there alone: a graph may have their steps in any order."""
    if isinstance(inner, Slotted):
        return Slotted((*inner.slots, slot), inner.core)
    return Slotted((slot,), inner)


def _product(tensor: Tensor) -> Form:
    items = list(_factors(tensor, 1))
    cores = [(item, sign) for item, sign in items if item.op not in {"Variable", "Number"}]
    slots = [item.name for item, _ in items if _slot(item) == "scale"]
    names = [(item.name, sign) for item, sign in items if item.op == "Variable" and _slot(item) != "scale"]
    if not cores and names and names[0][1] == 1 and (slots or len(names) == 1):
        cores, names = [(next(item for item, _ in items if item.op == "Variable" and item.name == names[0][0]), 1)], names[1:]
    if len(cores) != 1 or cores[0][1] != 1 or len(slots) > 1:
        return Op(tensor.op, (), tuple(map(normal, tensor.args)))
    coefficient = 1.0
    for item, sign in items:
        if item.op == "Number":
            coefficient *= item.value**sign
    core = normal(cores[0][0])
    if slots and not names and coefficient == 1:
        return _slotted(slots[0], core)
    return FactorProduct(slots[0] if slots else None, tuple(names), coefficient, core)


def _factors(tensor: Tensor, sign: int) -> Iterator[tuple[Tensor, int]]:
    if tensor.op in {"Mul", "Div"}:
        yield from _factors(tensor.args[0], sign)
        yield from _factors(tensor.args[1], -sign if tensor.op == "Div" else sign)
    elif tensor.op == "Neg":
        yield Tensor("Number", (), (("value", -1.0),)), 1
        yield from _factors(tensor.args[0], sign)
    else:
        yield tensor, sign


def _slot(tensor: Tensor) -> str | None:
    return kind_of(tensor.name) if tensor.op == "Variable" else None


def parts(form: Form) -> Iterator[Form]:
    """The form and everything in it."""
    yield form
    if isinstance(form, Op):
        for arg in form.args:
            yield from parts(arg)
    elif isinstance(form, (FactorProduct, Slotted)):
        yield from parts(form.core)


def slot_groups(form: Form) -> frozenset[tuple[str, ...]]:
    """The slots of a form, those together that are in one place."""
    found: set[tuple[str, ...]] = set()
    for part in parts(form):
        if isinstance(part, Slotted):
            found.add(tuple(sorted(part.slots)))
        elif isinstance(part, FactorProduct) and part.slot is not None:
            found.add((part.slot,))
    return frozenset(found)


def names_of(form: Form) -> frozenset[str]:
    """Operands of a form, slots apart from those of `Op` that are misused."""
    found: set[str] = set()
    for part in parts(form):
        if isinstance(part, Var):
            found.add(part.name)
        elif isinstance(part, FactorProduct):
            found.update(name for name, _ in part.factors)
    return frozenset(found)


_Rewrite: TypeAlias = Callable[[Form], Form]
_Chosen: TypeAlias = Mapping[str, _Rewrite]


def equivalents(form: Form) -> Iterator[Form]:
    """The formula in every form, the author's among them; a term that occurs several times is written alike everywhere."""
    gathered = _changed(form, _gathered)
    found = sorted({part.op for part in parts(gathered) if isinstance(part, Op) and part.op in _EQUIVALENTS})
    for choice in itertools.product(*(_EQUIVALENTS[op] for op in found)):
        yield _changed(gathered, functools.partial(_written_out, dict(zip(found, choice, strict=True))))


def _changed(form: Form, change: Callable[[Op], Form]) -> Form:
    """The formula with each operator changed, the innermost first."""
    if isinstance(form, Op):
        return change(dataclasses.replace(form, args=tuple(_changed(arg, change) for arg in form.args)))
    if isinstance(form, (FactorProduct, Slotted)):
        return dataclasses.replace(form, core=_changed(form.core, change))
    return form


def _written_out(chosen: _Chosen, form: Op) -> Form:
    return chosen[form.op](form.args[0]) if form.op in chosen else form


def _op(op: str, *args: Form) -> Op:
    return Op(op, (), args)


def _gathered(form: Op) -> Form:
    """The one operator that computes what a few operators do, or the formula as it is."""
    inner = form.args[0] if form.args else None
    if form.op == "Add":
        return next((whole for one, other in _both(form) if (whole := _without_maximum(one, other)) is not None), form)
    if not isinstance(inner, Op) or form.op not in _GATHERED:
        return form
    for below, whole in _GATHERED[form.op]:
        if inner.op == below and (below != "Mul" or inner.args[0] == inner.args[1]):
            return _gathered(_op(whole, inner.args[0]))
    return form


def _both(form: Op) -> tuple[tuple[Form, Form], tuple[Form, Form]]:
    one, other = form.args
    return (one, other), (other, one)


def _without_maximum(largest: Form, rest: Form) -> Form | None:
    """`x` under one logarithm of a sum, if that is what `max(x)` and the logarithm of the rest make."""
    if not isinstance(largest, Op) or largest.op != "ReduceMax" or not isinstance(rest, Op) or rest.op != "ReduceLogSumExp":
        return None
    (x,) = largest.args
    return _op("ReduceLogSumExp", x) if rest.args == (_op("Sub", x, largest),) else None


def _shifted(x: Form) -> Form:
    largest = _op("ReduceMax", x)
    return _op("Add", largest, _logarithm(_op("Sub", x, largest)))


def _logarithm(x: Form) -> Form:
    return _op("Log", _op("ReduceSum", _op("Exp", x)))


def _square(x: Form) -> Form:
    return _op("ReduceSum", _op("Mul", x, x))


_GATHERED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Log": (("ReduceSum", "ReduceLogSum"),),
    "ReduceLogSum": (("Exp", "ReduceLogSumExp"),),
    "ReduceSum": (("Abs", "ReduceL1"), ("Mul", "ReduceSumSquare")),
    "Sqrt": (("ReduceSumSquare", "ReduceL2"),),
}
"""By operator: the one before it, and the operator that equals both."""
_EQUIVALENTS: Mapping[str, tuple[_Rewrite, ...]] = {
    "ReduceL1": (lambda x: _op("ReduceL1", x), lambda x: _op("ReduceSum", _op("Abs", x))),
    "ReduceL2": (
        lambda x: _op("ReduceL2", x),
        lambda x: _op("Sqrt", _op("ReduceSumSquare", x)),
        lambda x: _op("Sqrt", _square(x)),
    ),
    "ReduceLogSum": (lambda x: _op("ReduceLogSum", x), lambda x: _op("Log", _op("ReduceSum", x))),
    "ReduceLogSumExp": (
        lambda x: _op("ReduceLogSumExp", x),
        lambda x: _op("ReduceLogSum", _op("Exp", x)),
        _logarithm,
        _shifted,
    ),
    "ReduceSumSquare": (lambda x: _op("ReduceSumSquare", x), _square),
}
REDUCTIONS = frozenset(_EQUIVALENTS)
"""Operators that a formula may have although no author writes them."""
