"""Indices as digits: an index that is divided is read as a number of several digits, so that the quotients are digits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.terms import BINDERS, ZERO, Term, add, free, from_polynomial, index, multiply, number, polynomial, walk

_MAX_CASES = 8


def bases(terms: Sequence[Term], place: Term) -> list[int]:
    """The widths at which an index of constant length is divided or compared, each dividing the next."""
    length = place.args[0]
    if length.op != "const":
        return []
    found: set[int] = set()
    for term in terms:
        for item in walk(term):
            if item.op in {"div", "mod"} and item.args[1].op == "const" and place in free(item.args[0]):
                found.update(_common(item.args[0], place, int(item.args[1].data)))
            elif item.op in {"le0", "eq0"} and place in free(item.args[0]):
                parts = polynomial(item.args[0])
                if set(parts) <= {(), (place,)} and abs(parts.get((place,), 0)) == 1:
                    offset = abs(int(parts.get((), 0)))
                    found.update([offset, offset + 1])
            elif item.op == "div" and place in free(item.args[0]):
                found.update(_common(item.args[0], place, 0))
    kept: list[int] = []
    for width in sorted(found):
        if 1 < width < length.data and length.data % width == 0 and width % (kept[-1] if kept else 1) == 0:
            kept.append(width)
    return kept


def halves(terms: Sequence[Term], place: Term) -> Term | None:
    """An index of a length that is a product of sizes, as two digits where it is divided by one of them; None elsewhere."""
    length = place.args[0]
    if length.op != "poly":
        return None
    divisors = {
        item.args[1] for term in terms for item in walk(term) if item.op in {"div", "mod"} and place in free(item.args[0])
    }
    for divisor in sorted(divisors, key=lambda item: item.digest):
        parts = polynomial(divisor)
        (atoms, _), *others = parts.items()
        width = from_polynomial({atoms: 1}, "Int")
        count = None if others or not atoms else arithmetic.exact_quotient(length, width)
        if count is not None and count.op != "const":
            return add(multiply(width, index(f"{place.data}_h", count)), index(f"{place.data}_l", width))
    return None


def _common(term: Term, place: Term, width: int) -> Iterator[int]:
    """Widths of digits that a quotient of a polynomial asks for."""
    parts = polynomial(term)
    if (place,) in parts:
        yield width
        for atoms, factor in parts.items():
            if atoms != (place,):
                yield abs(int(factor))
    for item in parts:
        for atom in item:
            if atom.op not in BINDERS and place in free(atom) and atom is not place:
                yield width


def as_digits(place: Term, widths: Sequence[int]) -> Term:
    """An index as a number of digits."""
    result, steps = ZERO, [1, *widths, int(place.args[0].data)]
    for low, high in itertools.pairwise(steps):
        digit = index(f"{place.data}_{low}", number(high // low))
        result = add(result, multiply(number(low), digit))
    return result


def cases(place: Term, widths: Sequence[int]) -> Iterator[Mapping[Term, Term]]:
    """All values of the leading digit, if it has few; else the index as a number of digits."""
    if not widths:
        yield {}
        return
    whole = as_digits(place, widths)
    count = int(place.args[0].data) // widths[-1]
    if count > _MAX_CASES:
        yield {place: whole}
        return
    rest = (
        as_digits(index(str(place.data), number(widths[-1])), widths[:-1])
        if len(widths) > 1
        else index(f"{place.data}_1", number(widths[0]))
    )
    for value in range(count):
        yield {place: add(number(value * widths[-1]), rest)}
