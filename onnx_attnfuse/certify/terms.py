"""Terms over integers, reals and truth values, each kept once, in normal forms: the elements of arrays.

A number is a polynomial over atoms; an atom is a size, an index, an element of an array, a quotient, a choice or a sum. Two terms
that are written differently may be equal all the same, which is left to a solver; two that are the same object are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from onnx_attnfuse.certify.interned import PROOF, Sort, Term, make, make_shared

Number = int | Fraction
Polynomial = Mapping[tuple[Term, ...], Number]
_MAX_MONOMIALS = 24
"""A product that would have more stays a product of sums."""
BINDERS = frozenset(["sum", "all", "softmax", "max"])
"""Operators whose first argument is an index that the second one is read for."""


MASKLIKE = "m"
"""The prefix of arrays that may hold numbers that mask, or minus infinity."""
WEIGHT = "w"
"""The prefix of arrays that are constants, and hold no such number."""


def number(value: float | Number, sort: Sort = "Int") -> Term:
    """A constant; a float is exact."""
    return make("const", sort, (), int(value) if sort == "Int" else Fraction(value))


TRUE, FALSE = make_shared("const", "Bool", data=True), make_shared("const", "Bool", data=False)
ZERO, ONE = make_shared("const", "Int", 0), make_shared("const", "Int", 1)
NINF, NAN = make_shared("ninf", "Real"), make_shared("nan", "Real")


def truth(value: bool) -> Term:
    """A constant truth value."""
    return TRUE if value else FALSE


def size(name: str, *, positive: bool = False) -> Term:
    """A symbolic size, at least 0, or at least 1."""
    return make("size", "Int", (ONE,) if positive else (), name)


def index(name: str, length: Term) -> Term:
    """An index of that name, from 0 to below `length`."""
    return make("index", "Int", (length,), name)


def fresh(length: Term) -> Term:
    """An index that no other term has."""
    PROOF.indices += 1
    return index(f"fresh{PROOF.indices}", length)


def restart() -> None:
    """Names indices from the beginning, before a proof that shares no term with an earlier one."""
    PROOF.forget()


def element(name: str, sort: Sort, args: Iterable[Term]) -> Term:
    """The element of an array, or the value of a function, of which nothing else is known."""
    return make("element", sort, tuple(args), name)


def polynomial(term: Term) -> Polynomial:
    """The monomials of a number, each a sorted tuple of atoms, with its factor."""
    if term.op == "const":
        return {(): term.data} if term.data else {}
    if term.op == "poly":
        found: Polynomial = term.memo["polynomial"]
        return found
    return {(term,): 1}


def from_polynomial(parts: Polynomial, sort: Sort) -> Term:
    """The number of these monomials."""
    kept = {atoms: factor for atoms, factor in parts.items() if factor}
    if not kept:
        return number(0, sort)
    if len(kept) == 1:
        ((atoms, factor),) = kept.items()
        if not atoms:
            return number(factor, sort)
        if len(atoms) == 1 and factor == 1:
            return atoms[0]
    order = sorted(kept, key=lambda atoms: [atom.digest for atom in atoms])
    args = tuple(itertools.chain.from_iterable(order))
    data = tuple((len(atoms), kept[atoms] if sort == "Int" else Fraction(kept[atoms])) for atoms in order)
    term = make("poly", sort, args, data)
    term.memo["polynomial"] = {atoms: factor for atoms, (_, factor) in zip(order, data, strict=True)}
    return term


def add(*terms: Term) -> Term:
    """The sum; a number that masks is drawn through choices, and minus infinity absorbs."""
    found = PROOF.computed.get(terms)
    if found is None:
        found = PROOF.computed[terms] = _sum(terms)
    return found


def _sum(terms: tuple[Term, ...]) -> Term:
    sort = terms[0].sort
    if sort == "Real":
        if any(item is NAN for item in terms):
            return NAN
        if any(item is NINF for item in terms):
            return NINF
        for place, item in enumerate(terms):
            if item.op == "ite" and is_fill(item):
                rest = (*terms[:place], *terms[place + 1 :])
                return ite(item.args[0], add(item.args[1], *rest), add(item.args[2], *rest))
    chosen = [item for item in terms if item.op != "const"]
    if len(chosen) == 1 and len(terms) > 1 and is_constants(chosen[0]):
        rest = tuple(item for item in terms if item.op == "const")
        return ite(chosen[0].args[0], *(add(part, *rest) for part in chosen[0].args[1:]))
    total: dict[tuple[Term, ...], Number] = {}
    for item in terms:
        for atoms, factor in polynomial(item).items():
            total[atoms] = total.get(atoms, 0) + factor
    return from_polynomial(total, sort)


def is_fill(term: Term) -> bool:
    """Whether a choice has a number in it that may mask a score, or minus infinity."""
    if "fill" not in term.memo:
        parts = [term] if term.op != "ite" else list(term.args[1:])
        found = False
        for part in parts:
            if part.op == "ite":
                found = found or is_fill(part)
            elif part.sort == "Real":
                found = (
                    found
                    or part in {NINF, NAN}
                    or any(not atoms and abs(factor) >= 1000 for atoms, factor in polynomial(part).items())
                )
        term.memo["fill"] = found
    return bool(term.memo["fill"])


def is_constants(term: Term) -> bool:
    """Whether a term is a choice between constants."""
    return term.op == "ite" and all(part.op in {"const", "ninf"} or is_constants(part) for part in term.args[1:])


def multiply(left: Term, right: Term) -> Term:
    """The product, multiplied out while it stays small."""
    key = ("product", left, right)
    found = PROOF.computed.get(key)
    if found is None:
        found = PROOF.computed[key] = _product(left, right)
    return found


def _product(left: Term, right: Term) -> Term:
    sort = left.sort
    for one, other in ((left, right), (right, left)):
        if one is NAN:
            return one
        if one is NINF:
            return one if other.op == "const" and other.data > 0 else make("times", sort, tuple(sorted((left, right))))
        if one.op == "ite" and other.op == "const" and (is_fill(one) or is_constants(one)):
            return ite(one.args[0], multiply(one.args[1], other), multiply(one.args[2], other))
    first, second = polynomial(left), polynomial(right)
    if len(first) * len(second) > _MAX_MONOMIALS and min(len(first), len(second)) > 1:
        first, second = ({(_opaque(item),): 1} if len(parts) > 1 else parts for item, parts in ((left, first), (right, second)))
    total: dict[tuple[Term, ...], Number] = {}
    for atoms, factor in first.items():
        for others, times in second.items():
            key = tuple(sorted(atoms + others))
            total[key] = total.get(key, 0) + factor * times
    return from_polynomial(total, sort)


def _opaque(term: Term) -> Term:
    return make("group", term.sort, (term,))


def subtract(left: Term, right: Term) -> Term:
    """The difference."""
    return add(left, multiply(number(-1, left.sort), right))


def product(terms: Iterable[Term]) -> Term:
    """The product of integers, 1 for none."""
    result = ONE
    for item in terms:
        result = multiply(result, item)
    return result


def to_real(term: Term) -> Term:
    """An integer or a truth value as a real number."""
    if term.sort == "Real":
        return term
    if term.op == "const":
        return number(int(term.data), "Real")
    if term.sort == "Bool":
        return ite(term, number(1, "Real"), number(0, "Real"))
    if term.op == "ite":
        return ite(term.args[0], to_real(term.args[1]), to_real(term.args[2]))
    return make("real", "Real", (term,))


def ite(condition: Term, then: Term, other: Term) -> Term:
    """The choice between two terms of one sort."""
    if condition is TRUE or then is other:
        return then
    if condition is FALSE:
        return other
    if condition.op == "not":
        return ite(condition.args[0], other, then)
    if then.op == "ite" and then.args[0] is condition:
        return ite(condition, then.args[1], other)
    if other.op == "ite" and other.args[0] is condition:
        return ite(condition, then, other.args[2])
    if condition.op in {"eq0", "le0"} and then.sort == "Int" and condition.args[0].sort == "Int":
        form, gap = condition.args[0], subtract(other, then)
        if (gap is form or multiply(number(-1), gap) is form) and (condition.op == "eq0" or _is_nonnegative(form)):
            return other
    if then.sort == "Bool":
        if then.op == "const":
            return disjoin(condition, other) if then.data else conjoin(negate(condition), other)
        if other.op == "const":
            return disjoin(negate(condition), then) if other.data else conjoin(condition, then)
    return make("ite", then.sort, (condition, then, other))


def _is_nonnegative(term: Term) -> bool:
    from onnx_attnfuse.certify.arithmetic import is_nonnegative

    return is_nonnegative(term)


def negate(term: Term) -> Term:
    """The opposite of a truth value."""
    if term.op == "const":
        return truth(not term.data)
    return term.args[0] if term.op == "not" else make("not", "Bool", (term,))


def _joined(op: str, terms: Iterable[Term], neutral: Term, absorbing: Term) -> Term:
    parts: dict[Term, None] = {}
    for item in terms:
        parts.update(dict.fromkeys(item.memo["written"] if item.op == op else (item,)))
    parts.pop(neutral, None)
    if absorbing in parts or any(negate(part) in parts for part in parts):
        return absorbing
    if not parts:
        return neutral
    if len(parts) == 1:
        return next(iter(parts))
    joined = make(op, "Bool", tuple(sorted(parts)))
    joined.memo.setdefault("written", tuple(parts))
    return joined


def conjoin(*terms: Term) -> Term:
    """All of them."""
    return _joined("and", terms, TRUE, FALSE)


def disjoin(*terms: Term) -> Term:
    """At least one of them."""
    return _joined("or", terms, FALSE, TRUE)


def rebuilt(term: Term, args: tuple[Term, ...]) -> Term:
    """The term with other arguments, simplified anew; bound indices are the caller's."""
    from onnx_attnfuse.certify import arithmetic

    if term.op == "poly":
        place, total = 0, list[Term]()
        for count, factor in term.data:
            item = number(factor, term.sort)
            for atom in args[place : place + count]:
                item = multiply(item, atom)
            total.append(item)
            place += count
        return add(*total)
    rules: Mapping[str, Callable[..., Term]] = {
        "ite": ite, "not": negate, "and": conjoin, "or": disjoin, "real": to_real,
        "div": arithmetic.divide, "mod": arithmetic.modulo,
        "le0": arithmetic.at_most_zero, "eq0": arithmetic.is_zero, "lt0": arithmetic.below_zero,
    }  # fmt: skip
    if term.op == "function" or term.data == "infinite":
        from onnx_attnfuse.certify.softmaxes import function, is_minus_infinity

        return is_minus_infinity(args[0]) if term.op == "element" else function(term.data, *args)
    if term.op in rules:
        return rules[term.op](*args)
    return make(term.op, term.sort, args, term.data)


def substitute(term: Term, places: Mapping[Term, Term]) -> Term:
    """The term with other terms for some of its indices or atoms."""
    done: dict[Term, Term] = dict(places)
    brought = frozenset[Term]().union(*map(free, places.values()))

    def walk(item: Term) -> Term:
        found = done.get(item)
        if found is None:
            if not item.args:
                found = item
            elif item.op in BINDERS:
                found = _under_binder(item, walk, done, brought)
            else:
                args = tuple(map(walk, item.args))
                found = item if args == item.args else rebuilt(item, args)
            done[item] = found
        return found

    return walk(term)


def _under_binder(item: Term, walk: Callable[[Term], Term], done: dict[Term, Term], brought: frozenset[Term]) -> Term:
    bound, body, *others = item.args
    if bound in brought or (bound in done and done[bound] is not bound):  # an inner index of the same name is another one
        inner = fresh(bound.args[0])
        body = substitute(body, {bound: inner})
        bound = inner
    length = walk(bound.args[0])
    turned = bound
    if length is not bound.args[0]:
        turned = fresh(length)
        body = substitute(body, {bound: turned})
    result = walk(body)
    if result is item.args[1] and turned is item.args[0] and all(walk(other) is other for other in others):
        return item
    if item.op == "max":
        from onnx_attnfuse.certify.softmaxes import largest

        return largest(turned, result)
    if item.op == "sum" and item.sort == "Real":  # facts about indices may now leave less inside
        from onnx_attnfuse.certify.sums import total

        return total(turned, result)
    return bind(item.op, turned, result, item.sort, *map(walk, others), data=item.data)


def depth(term: Term) -> int:
    """How deep binders are nested in a term."""
    if "depth" not in term.memo:
        term.memo["depth"] = max(map(depth, term.args), default=0) + (term.op in BINDERS)
    return int(term.memo["depth"])


def bind(op: str, bound: Term, body: Term, sort: Sort, *others: Term, data: Any = None) -> Term:
    """A term with a bound index, which is named after its depth: two that differ in its name only are one."""
    level = depth(body)
    named = index(f"@{level}", bound.args[0])
    while named is not bound and named in free(body):
        level += 1
        named = index(f"@{level}", bound.args[0])
    return make(op, sort, (named, substitute(body, {bound: named}), *others), data)


def free(term: Term) -> frozenset[Term]:
    """The indices that are free in a term."""
    if "free" not in term.memo:
        found: frozenset[Term] = frozenset(term.args[:0])
        if term.op == "index":
            found = frozenset([term]).union(free(term.args[0]))
        elif term.args:
            found = frozenset[Term]().union(*map(free, term.args))
            if term.op in BINDERS:
                found = found - {term.args[0]} | free(term.args[0].args[0])
        term.memo["free"] = found
    result: frozenset[Term] = term.memo["free"]
    return result


def walk(term: Term) -> Iterator[Term]:
    """The term and all in it, each once, binders' bodies included."""
    seen, pending = {term}, [term]
    while pending:
        item = pending.pop()
        yield item
        for part in item.args:
            if part not in seen:
                seen.add(part)
                pending.append(part)
