"""Element-wise operators on the terms that masks are made of, simplified as they are applied.

Integers and truth values are those of certificates. Floats stay as they were written, one node after the other, since the order
of additions shows in rows without a key: numbers, choices between numbers, and operators that are not looked into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, terms
from onnx_attnfuse.certify.arrays import Unsupported, sort_of
from onnx_attnfuse.certify.interned import make_shared
from onnx_attnfuse.certify.terms import Term, ite, negate, number, polynomial, to_real
from onnx_attnfuse.graph.dtypes import FLOATS, HALVES, WHOLE_TO, integers

INF = make_shared("inf", "Real")
_ZERO, _ONE = make_shared("const", "Real", Fraction(0)), make_shared("const", "Real", Fraction(1))
_WIDE = frozenset([ir.DataType.INT64, ir.DataType.INT32])
"""Integer types that do not wrap around at numbers which positions and their differences may reach."""
NUMBERS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Div": np.divide, "Max": np.maximum, "Min": np.minimum, "Mul": np.multiply, "Sub": np.subtract,
}  # fmt: skip
"""Operators on two numbers."""
RELATIONS: dict[str, tuple[Callable[..., Any], Callable[[Term, Term], Term]]] = {
    "Equal": (np.equal, arithmetic.equals),
    "Greater": (np.greater, lambda left, right: arithmetic.below(right, left)),
    "GreaterOrEqual": (np.greater_equal, lambda left, right: arithmetic.at_most(right, left)),
    "Less": (np.less, arithmetic.below),
    "LessOrEqual": (np.less_equal, arithmetic.at_most),
}
"""Comparisons of numbers, and of forms."""
_MAX_NUMBERS = 16
"""Numbers that a sum of choices may come to, to be written as one choice."""
_MEASURES = frozenset(["size", "measure", "const"])
_ATOMS = frozenset(["index", "element", "whole"])


def apply(op: str, items: Sequence[Term], dtype: ir.DataType) -> Term:
    """The result of an element-wise operator on floats; one that is not looked into stays as it is.

    Args:
        op: ONNX operator type.
        items: Its inputs at the index in question.
        dtype: Element type of the result.
    """
    found = _simplified(op, items)
    if found is None or not fits(found, dtype) or not is_read(found):
        return opaque(op, items, dtype)
    return _stored(found, dtype) if dtype in FLOATS and op in NUMBERS else found


def opaque(op: str, items: Sequence[Term], dtype: ir.DataType) -> Term:
    """An operator that is not looked into."""
    return terms.make("apply", sort_of(dtype), tuple(items), op)


def drawn(term: Term) -> Term:
    """An integer with the choice in it drawn around it, if there is one."""
    choices = {atom for atoms in polynomial(term) for atom in atoms if atom.op == "ite"} if term.op == "poly" else set[Term]()
    if len(choices) != 1:
        return term
    (choice,) = choices
    return ite(choice.args[0], *(drawn(terms.substitute(term, {choice: part})) for part in choice.args[1:]))


def branches(term: Term) -> list[Term]:
    """The terms that a choice is among; the term itself if it is none."""
    return [branch for part in term.args[1:] for branch in branches(part)] if term.op == "ite" else [term]


def mapped(term: Term, change: Callable[[Term], Term | None]) -> Term | None:
    """A choice between the results for what it is among; None if one of them is None."""
    if term.op != "ite":
        return change(term)
    chosen, other = (mapped(part, change) for part in term.args[1:])
    return None if chosen is None or other is None else ite(term.args[0], chosen, other)


def is_read(term: Term) -> bool:
    """Whether a term is one that masks are made of: forms over indices, comparisons, choices, and operators on these."""
    if "is read" not in term.memo:
        term.memo["is read"] = _is_read(term)
    return bool(term.memo["is read"])


def _is_read(term: Term) -> bool:
    if term.op in {"and", "or", "not", "ite", "apply", "element"}:
        return all(map(is_read, term.args))
    if term.op in {"const", "ninf", "nan", "inf"}:
        return True
    if term.op in {"le0", "eq0", "real"}:
        form = term.args[0]
        return is_form(form) or (form.op in {"element", "apply"} and is_read(form) and term.op != "le0")
    return is_form(term)


def is_form(term: Term) -> bool:
    """Whether an integer is a linear form over indices and elements, with sizes as factors."""
    if term.sort != "Int":
        return False
    if "is form" not in term.memo:
        others = [[atom for atom in atoms if not is_measure(atom)] for atoms in polynomial(term)]
        term.memo["is form"] = all(len(atoms) <= 1 and all(map(_is_place, atoms)) for atoms in others)
    return bool(term.memo["is form"])


def _is_place(atom: Term) -> bool:
    """Whether an atom is an index, or an element that is read."""
    return atom.op == "index" or (atom.op in _ATOMS and all(map(is_read, atom.args)))


def is_measure(term: Term) -> bool:
    """Whether an integer is made of sizes alone."""
    return term.op in _MEASURES or (term.op in {"poly", "div"} and all(map(is_measure, term.args)))


def _stored(term: Term, dtype: ir.DataType) -> Term:
    """A choice between computed numbers as the element type holds them: the sum of two lowest numbers is -inf."""
    if term.op == "ite":
        return ite(term.args[0], _stored(term.args[1], dtype), _stored(term.args[2], dtype))
    value = float_of(term)
    if value is None:
        return term
    with np.errstate(over="ignore"):
        return literal(float(np.asarray(value).astype(dtype.numpy())))


def float_of(term: Term) -> float | None:
    """The number that a float is, if it is known."""
    if term.op == "const" and term.sort == "Real":
        return float(term.data)
    return {"ninf": -math.inf, "inf": math.inf, "nan": math.nan}.get(term.op)


def literal(value: float) -> Term:
    """A float as a term."""
    if math.isfinite(value):
        return number(value, "Real")
    return terms.NAN if math.isnan(value) else INF if value > 0 else terms.NINF


def product(term: Term, factor: float) -> Term | None:
    """A number, or a choice between numbers, times another; None if it is something else."""
    return _binary("Mul", term, literal(factor))


def fits(term: Term, dtype: ir.DataType) -> bool:
    """Whether index arithmetic stays exact in an element type, at every index and size."""
    if term.op == "ite":
        return all(fits(part, dtype) for part in branches(term))
    form = term.args[0] if term.op == "real" else term
    is_narrow = dtype in HALVES or (dtype.is_integer() and dtype not in _WIDE)
    if form.sort != "Int" or form.op in {"element", "apply"} or not is_narrow:
        return True
    least, most = (-WHOLE_TO[dtype], WHOLE_TO[dtype]) if dtype in HALVES else integers(dtype)
    return all(arithmetic.is_nonnegative(terms.subtract(*gap)) for gap in ((form, number(least)), (number(most), form)))


def _simplified(op: str, items: Sequence[Term]) -> Term | None:
    if op == "Where":
        return ite(items[0], _given(items[0], items[1]), _given(negate(items[0]), items[2]))
    if op in RELATIONS and len(items) == 2:
        return _relation(op, items[0], items[1])
    if len(items) == 1:
        return _unary(op, items[0])
    return _binary(op, items[0], items[1]) if op in NUMBERS and len(items) == 2 else None


def is_nonzero(term: Term) -> Term:
    """A number as a truth value."""
    if term.sort == "Bool":
        return term
    if term.op == "ite":
        return ite(term.args[0], is_nonzero(term.args[1]), is_nonzero(term.args[2]))
    value = float_of(term)
    if value is not None:
        return terms.truth(value != 0)
    if term.op == "real":
        return is_nonzero(term.args[0])
    if term.op == "apply" and term.data == "Mul":
        return terms.conjoin(*map(is_nonzero, term.args))
    if term.op == "apply":
        return negate(terms.make("apply", "Bool", (term, _ZERO), "Equal"))
    return negate(arithmetic.is_zero(term))


def _given(condition: Term, part: Term) -> Term:
    """A number where a condition holds: 0 where that says that it is 0."""
    if part.op == "ite" and part.args[0] in {condition, negate(condition)}:
        return _given(condition, part.args[1 if part.args[0] is condition else 2])
    is_number = part.op in {"element", "apply", "poly", "index", "real"} and part.sort != "Bool"
    return zero_like(part) if is_number and is_nonzero(part) is negate(condition) else part


def zero_like(term: Term) -> Term:
    """Zero, or false, of the sort of a term."""
    return terms.FALSE if term.sort == "Bool" else number(0, term.sort)


def cast(term: Term, source: ir.DataType, target: ir.DataType) -> Term:
    """An element of one type as one of another.

    Raises:
        Unsupported: It may be rounded, or wrap around.
    """
    if target == ir.DataType.BOOL:
        return is_nonzero(term)
    if term.sort == "Bool":
        sort = sort_of(target)
        return ite(term, number(1, sort), number(0, sort))
    if term.op == "ite":
        return ite(term.args[0], cast(term.args[1], source, target), cast(term.args[2], source, target))
    found = to_real(term) if target in FLOATS else _as_integer(term, source)
    if found is None or not fits(found, target):
        raise Unsupported("a number that its new type may not hold")
    return found


def _as_integer(term: Term, source: ir.DataType) -> Term | None:
    """A number as an integer, fractions cut off."""
    value = float_of(term)
    if value is not None:
        return number(int(value)) if math.isfinite(value) else None
    if term.op == "real":
        return term.args[0]
    return term if term.sort == "Int" and source not in FLOATS else None


def form_of(term: Term) -> Term | None:
    """A number as a linear form; a float that is read counts as a whole number, as masks of 0 and 1 are."""
    if term.sort == "Int":
        return term if is_form(term) else None
    if term.op == "real":
        return form_of(term.args[0])
    if term.op == "element" and term.sort == "Real":
        return terms.make("whole", "Int", (term,))
    value = float_of(term)
    return number(int(value)) if value is not None and abs(value) < 2**31 and value == int(value) else None


def _relation(op: str, left: Term, right: Term) -> Term | None:
    if left.op == "ite":
        return mapped(left, lambda part: _relation(op, part, right))
    if right.op == "ite":
        return mapped(right, lambda part: _relation(op, left, part))
    on_numbers, on_forms = RELATIONS[op]
    one, two = float_of(left), float_of(right)
    if one is not None and two is not None:
        return terms.truth(bool(on_numbers(one, two)))
    first, second = form_of(left), form_of(right)
    return None if first is None or second is None else on_forms(first, second)


def _unary(op: str, term: Term) -> Term | None:
    if op == "Neg":
        return _binary("Mul", term, number(-1, term.sort))
    if op == "Log" and term.op == "ite":
        return mapped(term, lambda part: _unary(op, part))
    value = float_of(term)
    if op == "Log" and value is not None and value >= 0:
        return literal(math.log(value) if value else -math.inf)
    return None


def _binary(op: str, left: Term, right: Term) -> Term | None:
    one, two = float_of(left), float_of(right)
    if one is not None and two is not None:
        with np.errstate(all="ignore"):
            return literal(float(NUMBERS[op](one, two))) if op != "Div" or two else None
    if left.op == right.op == "ite" and left.args[0] is right.args[0]:
        chosen, other = (_binary(op, *pair) for pair in zip(left.args[1:], right.args[1:], strict=True))
        return None if chosen is None or other is None else ite(left.args[0], chosen, other)
    if left.op == "ite" and (two is not None or right.op == "real"):
        return mapped(left, lambda part: _binary(op, part, right))
    if right.op == "ite" and (one is not None or left.op == "real"):
        return mapped(right, lambda part: _binary(op, left, part))
    found = _complement(op, left, right) or _bounded_sum(op, left, right)
    if found is None and left.op == right.op == "real" and op in _ON_FORMS:
        found = to_real(_ON_FORMS[op](left.args[0], right.args[0]))
        return found if is_read(found) else None
    return _neutral(op, left, right) if found is None else found


_ON_FORMS = {"Add": terms.add, "Sub": terms.subtract, "Mul": terms.multiply}


def _bounded_sum(op: str, left: Term, right: Term) -> Term | None:
    """`max(a + b, number)` or `min(a + b, number)` for choices between numbers a and b, as a choice between numbers."""
    for part, bound in ((left, right), (right, left)):
        if op in {"Max", "Min"} and float_of(bound) is not None and part.op == "apply" and part.data == "Add":
            total = _total(part)
            return None if total is None else _binary(op, total, bound)
    return None


def _total(term: Term) -> Term | None:
    """A sum of choices between numbers as one choice between few numbers; None if it is something else."""
    if term.op == "ite":
        return mapped(term, _total)
    if term.op == "apply" and term.data == "Add":
        one, two = map(_total, term.args)
        is_small = one is not None and two is not None and len(branches(one)) * len(branches(two)) <= _MAX_NUMBERS
        return mapped(one, lambda part: _binary("Add", part, two)) if one is not None and two is not None and is_small else None
    return None if float_of(term) is None else term


def _complement(op: str, left: Term, right: Term) -> Term | None:
    """`(1 - m) · fill` for a mask m of zeros and ones: 0 where m is set, fill where it is not."""
    if op == "Sub" and left is _ONE and (right.args[0] if right.op == "real" else right).op == "element":
        return terms.make("apply", "Real", (right,), "Complement")
    for first, second in ((left, right), (right, left)):
        fill, inner = float_of(second), _complemented(first)
        if op == "Mul" and inner is not None and fill is not None:
            return ite(is_nonzero(inner), _ZERO, second) if math.isfinite(fill) else None
    return None


def _complemented(term: Term) -> Term | None:
    """The element m of `1 - m`."""
    if term.op == "real":
        inner = terms.subtract(terms.ONE, term.args[0])
        return inner if inner.op == "element" else None
    return term.args[0] if term.op == "apply" and term.data == "Complement" else None


def _neutral(op: str, left: Term, right: Term) -> Term | None:
    """Adding 0 and multiplying by 1."""
    if op == "Add" and _ZERO in {left, right}:
        return right if left is _ZERO else left
    return left if op in {"Mul", "Div"} and right is _ONE else None
