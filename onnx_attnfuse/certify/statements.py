"""Statements on all values of an index: their consequences for single ones, and for terms bound to an index as long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnx_attnfuse.certify import arithmetic, sums
from onnx_attnfuse.certify.softmaxes import largest
from onnx_attnfuse.certify.terms import (
    BINDERS,
    FALSE,
    TRUE,
    ZERO,
    Term,
    bind,
    conjoin,
    depth,
    disjoin,
    element,
    free,
    fresh,
    negate,
    substitute,
    walk,
)


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
    statements = [item for item in dict.fromkeys(_all_outermost([*given, goal])) if item.op == "all"]
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


def _all_outermost(terms: Iterable[Term]) -> Iterator[Term]:
    for term in terms:
        yield from outermost(term)


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
        return sums.total(key, body)
    return bind(item.op, key, body, item.sort, *item.args[2:], data=item.data)
