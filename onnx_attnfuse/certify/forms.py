"""Forms of terms used by proofs: conditions to split by, indices that a condition narrows, a softmax that weighs values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx_attnfuse.certify import digits
from onnx_attnfuse.certify.statements import outermost
from onnx_attnfuse.certify.sums import total
from onnx_attnfuse.certify.terms import (
    ONE,
    ZERO,
    Term,
    add,
    conjoin,
    free,
    from_polynomial,
    index,
    negate,
    number,
    polynomial,
    substitute,
    subtract,
    truth,
    walk,
)

_MAX_CASES = 8
_MAX_PRODUCTS = 6


def sizes_in(term: Term) -> set[Term]:
    """The sizes in a term."""
    return {item for item in walk(term) if item.op == "size"}


def is_tangled(goal: Term) -> bool:
    """Whether a goal is an equality of so many products of reals that solvers find no end, whatever their limits."""
    if goal.op != "eq0" or goal.args[0].sort != "Real":
        return False
    return sum(len(atoms) > 1 for atoms in polynomial(goal.args[0])) > _MAX_PRODUCTS


def likely_keys(mask: Term, bound: Term) -> Iterator[Term]:
    """Keys that a row probably sees: its own, counted from either end, and the first and the last."""
    length = bound.args[0]
    yield ZERO
    yield subtract(length, ONE)
    for item in sorted(free(mask) - {bound}, key=lambda item: str(item.data)):
        yield item
        yield subtract(add(item, length), item.args[0])


def narrowed(condition: Term, *, holds: bool) -> dict[Term, Term]:
    """An index that is compared with a size, as one from 0 to the size, or from there to its end."""
    if condition.op != "le0":
        return {}
    for item in sorted(free(condition), key=lambda item: str(item.data)):
        if item.args[0].op == "const" and item.args[0].data <= _MAX_CASES:
            values = range(item.args[0].data)
            left = [value for value in values if substitute(condition, {item: number(value)}) is not truth(not holds)]
            if left and len(left) < len(values) and left == list(range(left[0], left[-1] + 1)):
                rest = index(f"{item.data}n", number(len(left)))
                return {item: number(left[0]) if len(left) == 1 else add(number(left[0]), rest)}
    parts = polynomial(condition.args[0])
    for (item, *others), factor in ((atoms, factor) for atoms, factor in parts.items() if atoms):
        if others or item.op != "index" or abs(factor) != 1:
            continue
        rest = from_polynomial({atoms: times for atoms, times in parts.items() if atoms != (item,)}, "Int")
        if free(rest) or item in free(rest):
            continue
        is_low = (factor > 0) == holds
        edge = subtract(ONE, rest) if factor > 0 else rest
        if is_low:
            return {item: index(f"{item.data}l", edge)}
        return {item: add(edge, index(f"{item.data}h", subtract(item.args[0], edge)))}
    return {}


def condition_of(term: Term) -> Term | None:
    """The condition of a choice in a sum, a product or a function; None if there is none."""
    if term.sort == "Bool":
        return None
    found: list[Term] = []
    pending = [atom for atoms in polynomial(term) for atom in atoms]
    while pending:
        atom = pending.pop()
        if atom.op == "ite":
            found.append(atom.args[0])
        elif atom.op == "function":
            pending += [part for item in atom.args for atoms in polynomial(item) for part in atoms]
    return min(found) if found else None


def leaves(term: Term, test: Term) -> Iterator[tuple[Term, Term]]:
    """The parts of a choice, each with the test under which it is chosen."""
    if term.op == "ite":
        yield from leaves(term.args[1], conjoin(test, term.args[0]))
        yield from leaves(term.args[2], conjoin(test, negate(term.args[0])))
    else:
        yield term, test


def replaced(term: Term, places: dict[Term, Term]) -> Term:
    """The term with other terms for some of its parts."""
    return substitute(term, places) if places else term


def weighed(body: Term, bound: Term) -> tuple[Term, Term] | None:
    """A softmax at an index, and its factor; None if the summand is no such product."""
    found = [item for item in outermost(body) if item.op == "softmax" and item.args[2] is bound]
    if len(found) != 1 or not _is_linear(body, found[0]):
        return None
    nothing = substitute(body, {found[0]: number(0, "Real")})
    if nothing.op != "const" or nothing.data:
        return None
    return found[0], substitute(body, {found[0]: number(1, "Real")})


def _is_linear(term: Term, atom: Term) -> bool:
    """Whether a term is linear in an atom, which is in no sum and in no condition."""
    if term is atom:
        return True
    if term.op == "ite":
        return not _has(term.args[0], atom) and all(_is_linear(part, atom) or not _has(part, atom) for part in term.args[1:])
    if term.op != "poly":
        return not _has(term, atom)
    for atoms in polynomial(term):
        parts = [item for item in atoms if _has(item, atom)]
        if len(parts) > 1 or not all(_is_linear(item, atom) for item in parts):
            return False
    return True


def _has(term: Term, atom: Term) -> bool:
    return any(item is atom for item in walk(term))


def sums_over_digits(one: Term, other: Term) -> tuple[Term, Term]:
    """Two numbers with each sum over an index that is divided as a sum over its digits, alike in both."""
    found = [item for item in dict.fromkeys((*outermost(one), *outermost(other))) if item.op == "sum" and item.sort == "Real"]
    places: dict[Term, Term] = {}
    for length in dict.fromkeys(item.args[0].args[0] for item in found):
        place = index("digits", length)
        bodies = {item: substitute(item.args[1], {item.args[0]: place}) for item in found if item.args[0].args[0] is length}
        widths = digits.bases(list(bodies.values()), place)
        whole = digits.as_digits(place, widths) if widths else place
        for item, body in bodies.items() if widths else ():
            summed = substitute(body, {place: whole})
            for digit in sorted(free(whole), key=lambda digit: str(digit.data)):
                summed = total(digit, summed)
            places[item] = summed
    return replaced(one, places), replaced(other, places)


def in_pairs(bodies: Sequence[Term], bound: Term, name: str) -> Iterator[list[tuple[Term, Term]]]:
    """Terms that have to be equal where one sum has adjacent terms that are half of its length apart in the other, either way.

    Args:
        bodies: The summands, both chosen by their index, as a rotation chooses by the channel; else there is nothing to try.
        bound: Their index.
        name: The name of the index of a pair.
    """
    length = bound.args[0]
    if length.op != "const" or int(length.data) % 2 or not all(_chooses(body, bound) for body in bodies):
        return
    half = int(length.data) // 2
    place = index(name, number(half))
    places = [(add(place, number(half * part)), add(place, place, number(part))) for part in range(2)]
    for apart, side_by_side in (bodies, bodies[::-1]):
        yield [(substitute(apart, {bound: one}), substitute(side_by_side, {bound: other})) for one, other in places]


def _chooses(body: Term, bound: Term) -> bool:
    return any(item.op == "ite" and bound in free(item.args[0]) for item in walk(body))
