"""Forms of terms used by proofs: conditions to split by, softmaxes that weigh values, statements on all values of an index.

An index that is divided is read as a number of several digits, so that the quotients are
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.softmaxes import largest
from onnx_attnfuse.certify.sums import total
from onnx_attnfuse.certify.terms import (
    BINDERS,
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Term,
    add,
    bind,
    conjoin,
    depth,
    disjoin,
    element,
    free,
    fresh,
    from_polynomial,
    index,
    multiply,
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
        widths = bases(list(bodies.values()), place)
        whole = as_digits(place, widths) if widths else place
        for item, body in bodies.items() if widths else ():
            summed = substitute(body, {place: whole})
            for digit in sorted(free(whole), key=lambda digit: str(digit.data)):
                summed = total(digit, summed)
            places[item] = summed
    return substitute(one, places), substitute(other, places)


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


def outermost(term: Term) -> Iterator[Term]:
    """The outermost sums, softmaxes and the like in a term, in order."""
    seen, pending = {term}, [term]
    while pending:
        item = pending.pop()
        if item.op in BINDERS:
            yield item
            continue
        for part in item.args:
            if part not in seen:
                seen.add(part)
                pending.append(part)


def instances(facts: Iterable[Term], goal: Term) -> list[Term]:
    """Facts, and the consequences of each statement on all values of an index: it holds for each free one, or fails for some."""
    given = list(facts)
    statements = [item for item in dict.fromkeys(part for term in (*given, goal) for part in outermost(term)) if item.op == "all"]
    places = sorted(frozenset[Term]().union(*map(free, [*given, goal])), key=lambda item: str(item.data))
    found = list(given)
    for count, item in enumerate(statements):
        witness = element(f"witness{count}", "Int", sorted(free(item), key=lambda item: str(item.data)))
        places.append(witness)
        inside = conjoin(arithmetic.at_most(ZERO, witness), arithmetic.below(witness, item.args[0].args[0]))
        found.append(disjoin(item, conjoin(inside, negate(substitute(item.args[1], {item.args[0]: witness})))))
    for item in statements:
        for place in _fitting(item, places):
            held = _at_place(item, place)
            found.append(disjoin(negate(item), held))
            for inner in dict.fromkeys(part for part in outermost(held) if part.op == "all" and part not in statements):
                found += [disjoin(negate(inner), _at_place(inner, other)) for other in _fitting(inner, places)]
    return found


def _fitting(statement: Term, places: Sequence[Term]) -> Sequence[Term]:
    """The indices of the statement's length, and witnesses; all, if there is none of that length."""
    length = statement.args[0].args[0]
    found = [place for place in places if place.op != "index" or place.args[0] is length]
    return found if any(place.op == "index" for place in found) else places


def _at_place(statement: Term, place: Term) -> Term:
    """A statement on all values of an index, at one of them."""
    bound, body = statement.args
    inside = conjoin(arithmetic.at_most(ZERO, place), arithmetic.below(place, bound.args[0]))
    return disjoin(negate(inside), substitute(body, {bound: place}))


def informed(term: Term, statement: Term) -> Term:
    """A term with what a statement says of each value of an index put in under all sums and the like that go over as many."""
    for _ in range(depth(term)):  # an outer one that was made anew has inner ones to look at
        found = _informed_once(term, statement)
        if found is term:
            break
        term = found
    return term


def _informed_once(term: Term, statement: Term) -> Term:
    bound, body = statement.args
    places: dict[Term, Term] = {}
    for item in dict.fromkeys(item for item in walk(term) if item.op in BINDERS):
        if item.args[0].args[0] is bound.args[0]:
            key = fresh(bound.args[0])
            inner = substitute(item.args[1], {item.args[0]: key})
            found = substitute(inner, _said(substitute(body, {bound: key})))
            if found is not inner:
                places[item] = _bound_again(item, key, found)
    return substitute(term, places) if places else term


def _said(body: Term) -> dict[Term, Term]:
    """Truth values that are known where another one holds."""
    literals = body.args if body.op == "and" else (body,)
    return dict((item.args[0], FALSE) if item.op == "not" else (item, TRUE) for item in literals)


def _bound_again(item: Term, key: Term, body: Term) -> Term:
    """A sum or the like over another body."""
    if item.op == "max":
        return largest(key, body)
    if item.op == "all":
        return arithmetic.every(key, body)
    if item.op == "sum":
        return total(key, body)
    return bind(item.op, key, body, item.sort, *item.args[2:], data=item.data)


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


def by_digits(place: Term, widths: Sequence[int]) -> Iterator[Mapping[Term, Term]]:
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
