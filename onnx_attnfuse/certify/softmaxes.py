"""The softmax of a row of scores and the terms summed with it: one term, with rows of nothing but minus infinity apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from onnx_attnfuse.certify import arithmetic, sums
from onnx_attnfuse.certify.magnitudes import are_small, is_below_all, is_small, rest_is_small
from onnx_attnfuse.certify.terms import (
    FALSE,
    NAN,
    NINF,
    TRUE,
    Number,
    Term,
    add,
    bind,
    disjoin,
    free,
    fresh,
    from_polynomial,
    is_constants,
    ite,
    make,
    multiply,
    negate,
    number,
    polynomial,
    substitute,
    subtract,
    truth,
)
from onnx_attnfuse.graph.thresholds import ABSORBS, MASKS

Score = Callable[[Term], Term]


def is_minus_infinity(term: Term) -> Term:
    """Whether a score is minus infinity; elements of masks and inputs may be, those of activations are numbers."""
    if term.op == "ite":
        return ite(term.args[0], is_minus_infinity(term.args[1]), is_minus_infinity(term.args[2]))
    if term is NINF:
        return TRUE
    if term.op == "const":
        return truth(is_below_all(term))
    if polynomial(term).get((), 0) <= ABSORBS and not rest_is_small(term):  # the sum may lie below all numbers
        return make("element", "Bool", (term,), "infinite")
    wild = [atom for atoms in polynomial(term) for atom in atoms if atom.op in {"element", "max"} and not is_small(atom)]
    return disjoin(*(make("element", "Bool", (item,), "infinite") for item in wild))


def is_masked(term: Term) -> Term:
    """Whether a score is masked: minus infinity, or a number of -1000 or less in it, as the assumptions say."""
    if "masked" not in term.memo:
        term.memo["masked"] = _is_masked(term)
    found: Term = term.memo["masked"]
    return found


def _is_masked(term: Term) -> Term:
    if term.op == "ite":
        return ite(term.args[0], is_masked(term.args[1]), is_masked(term.args[2]))
    if term is NINF:
        return TRUE
    large = {atoms: factor for atoms, factor in polynomial(term).items() if not _is_ordinary(atoms, factor)}
    if not large:
        return FALSE
    return arithmetic.at_most(from_polynomial(large, "Real"), number(MASKS, "Real"))


def _is_ordinary(atoms: tuple[Term, ...], factor: Number) -> bool:
    return are_small(atoms, factor) if atoms else abs(factor) < -MASKS


def is_nan(term: Term) -> Term:
    """Whether an element is NaN; elements of an array are not."""
    if term.op == "ite":
        return ite(term.args[0], is_nan(term.args[1]), is_nan(term.args[2]))
    return TRUE if term is NAN else FALSE


def weight(score: Score, length: Term, place: Term, sink: Term | None = None) -> Term:
    """The weight of one key, of at least one; NaN where all scores are minus infinity.

    Args:
        score: The score of a key.
        length: The number of keys.
        place: The key.
        sink: A score besides, without a value of its own.
    """
    bound = fresh(length)
    body = score(bound)
    unseen = is_minus_infinity(body)
    nothing = FALSE if sink is not None or unseen is FALSE else arithmetic.every(bound, unseen)
    if body.op == "ite" and bound not in free(body.args[0]):  # a choice by something that holds for a whole row
        condition, *parts = body.args
        return ite(condition, *(weight(functools.partial(_at, bound, part), length, place, sink) for part in parts))
    if sink is None:
        body = without_row(bound, body)
    others = () if sink is None else (sink,)
    return ite(nothing, NAN, bind("softmax", bound, body, "Real", place, *others))


def _at(bound: Term, body: Term, place: Term) -> Term:
    return substitute(body, {bound: place})


def without_row(bound: Term, body: Term) -> Term:
    """A score without the summands of all scores of its row, but for numbers that mask: in floats these leave nothing of it."""
    if body.sort != "Real" or body.op not in {"poly", "sum"}:
        return body
    parts = [(_of_key(bound, atoms), factor) for atoms, factor in polynomial(body).items()]
    kept = [(atoms, factor) for atoms, factor in parts if not are_small(atoms, factor) or any(map(_reads(bound), atoms))]
    return add(number(0, "Real"), *(functools.reduce(multiply, atoms, number(factor, "Real")) for atoms, factor in kept))


def _reads(bound: Term) -> Callable[[Term], bool]:
    return lambda atom: bound in free(atom)


def _of_key(bound: Term, atoms: tuple[Term, ...]) -> tuple[Term, ...]:
    """A product in which a sum is the only use of a key, with only the used part of the sum.

    In `sum (q · (k + b))` that is `sum (q · k)`: a bias of the keys adds one number to all scores of a row.
    """
    of_key = [atom for atom in atoms if bound in free(atom)]
    if len(of_key) != 1 or of_key[0].op != "sum":
        return atoms
    inner, body = of_key[0].args
    parts = polynomial(body)
    kept = {item: factor for item, factor in parts.items() if any(map(_reads(bound), item))}
    rest = from_polynomial({item: factor for item, factor in parts.items() if item not in kept}, "Real")
    if not kept or len(kept) == len(parts) or not is_small(sums.total(inner, rest)):
        return atoms
    return tuple(sums.total(inner, from_polynomial(kept, "Real")) if atom is of_key[0] else atom for atom in atoms)


def gathered(term: Term, *, is_finite: bool = False) -> Term:
    """A sum of exponentials times values over the sum of the exponentials, as values weighed by a softmax.

    Args:
        term: The sum.
        is_finite: Exponentials do not overflow; else the largest of a row must be subtracted.
    """
    if term.op == "ite":
        return ite(term.args[0], gathered(term.args[1], is_finite=is_finite), gathered(term.args[2], is_finite=is_finite))
    if term.sort != "Real":
        return term
    parts: dict[tuple[Term, ...], Number] = {}
    places = {atom: found for atoms in polynomial(term) for atom in atoms if (found := _split(atom)) is not atom}
    for atoms, factor in polynomial(substitute(term, places) if places else term).items():
        key = _over_exponentials(atoms, is_finite=is_finite)
        parts[key] = parts.get(key, 0) + factor
    return from_polynomial(parts, "Real")


def _over_exponentials(atoms: tuple[Term, ...], *, is_finite: bool) -> tuple[Term, ...]:
    for below in atoms:
        found = _summed(below.args[0]) if below.op == "function" and below.data == "inverse" else None
        if found is None or not (is_finite or _is_shifted(found[0].args[1].args[0])):
            continue
        summed, sinks = found
        for above in atoms:
            weighed = _share(above, summed, sinks) or _weighed(above, summed.args[1], summed.args[0], sinks)
            if weighed is not None:
                rest = list(atoms)
                rest.remove(below)
                rest.remove(above)
                return tuple(sorted([*rest, weighed]))
    return atoms


def _summed(term: Term) -> tuple[Term, tuple[Term, ...]] | None:
    """A sum of exponentials, and of another exponential beside it: of a sink; None if there is more."""
    sums, sinks = list[Term](), list[Term]()
    for atoms, factor in polynomial(term).items():
        if not atoms and factor == 1:
            sinks.append(number(0, "Real"))
        elif len(atoms) != 1 or factor != 1:
            return None
        elif atoms[0].op == "sum" and atoms[0].args[1].op == "function" and atoms[0].args[1].data == "exp":
            sums.append(atoms[0])
        elif atoms[0].op == "function" and atoms[0].data == "exp":
            sinks.append(atoms[0].args[0])
        else:
            return None
    return (sums[0], tuple(sinks)) if len(sums) == 1 and len(sinks) <= 1 else None


def _softmax(key: Term, score: Term, place: Term, sinks: tuple[Term, ...]) -> Term:
    """The softmax of scores without the summands of a whole row, which a sink then lacks, too."""
    kept = without_row(key, score)
    lost = subtract(score, kept)
    return bind("softmax", key, kept, "Real", place, *(subtract(sink, lost) for sink in sinks))


def _share(above: Term, summed: Term, sinks: tuple[Term, ...]) -> Term | None:
    """The weight of a key, of which `above` is the exponential; None if it is of no key."""
    bound, exponential = summed.args
    if above.op != "function":
        return None
    for place in sorted(free(above)):
        if place.args[0] is bound.args[0] and substitute(exponential, {bound: place}) is above:
            key = fresh(bound.args[0])
            return _softmax(key, substitute(exponential, {bound: key}).args[0], place, sinks)
    return None


def _split(atom: Term) -> Term:
    """A sum of values weighed by several softmaxes, as a sum for each."""
    if atom.op != "sum" or atom.sort != "Real":
        return atom
    bound, body = atom.args
    kinds = [frozenset(item for item in atoms if item.op == "softmax") for atoms in polynomial(body)]
    if len(set(kinds)) < len(kinds) or len(kinds) < 2 or not all(kinds):
        return atom
    return add(*(sums.total(bound, from_polynomial({atoms: times}, "Real")) for atoms, times in polynomial(body).items()))


def _is_shifted(term: Term) -> bool:
    """Whether the largest of a row is subtracted, so that no exponential overflows."""
    if term.op == "ite":
        return all(map(_is_shifted, term.args[1:]))
    return any(len(atoms) == 1 and atoms[0].op == "max" and factor == -1 for atoms, factor in polynomial(term).items())


def _weighed(above: Term, exponential: Term, bound: Term, sinks: tuple[Term, ...]) -> Term | None:
    """A sum with the exponential of its index as a factor throughout, with a softmax in its place."""
    if above.op != "sum" or above.args[0].args[0] is not bound.args[0]:
        return None
    key = fresh(bound.args[0])
    body, factor = substitute(above.args[1], {above.args[0]: key}), substitute(exponential, {bound: key})
    share = _softmax(key, factor.args[0], key, sinks)
    parts: dict[tuple[Term, ...], Number] = {}
    for atoms, times in polynomial(body).items():
        if factor not in atoms:
            return None
        rest = list(atoms)
        rest.remove(factor)
        parts[tuple(sorted([*rest, share]))] = times
    return bind("sum", key, from_polynomial(parts, "Real"), "Real")


def largest(bound: Term, body: Term) -> Term:
    """The largest number over an index of at least one value."""
    if bound not in free(body):
        return body
    if is_constants(body):
        first, *others = sorted(_leaves(body), key=_rank, reverse=True)
        result = others[-1] if others else first
        for leaf in [*reversed(others[:-1]), first] if others else []:
            result = ite(arithmetic.every(bound, negate(_is_leaf(body, leaf))), result, leaf)
        return result
    return bind("max", bound, body, body.sort)


def _leaves(term: Term) -> frozenset[Term]:
    return frozenset([term]) if term.op != "ite" else _leaves(term.args[1]) | _leaves(term.args[2])


def _rank(leaf: Term) -> float:
    return -math.inf if leaf is NINF else float(leaf.data)


def _is_leaf(term: Term, leaf: Term) -> Term:
    """Whether a choice comes to one of its constants."""
    if term.op == "ite":
        return ite(term.args[0], _is_leaf(term.args[1], leaf), _is_leaf(term.args[2], leaf))
    return TRUE if term is leaf else FALSE


def function(name: str, *args: Term) -> Term:
    """A function of numbers of which nothing else is known."""
    if any(item is NAN for item in args):
        return NAN
    if len(args) == 1 and args[0].op == "ite" and any(item.op == "const" for item in args[0].args[1:]):
        condition, then, other = args[0].args
        return ite(condition, function(name, then), function(name, other))
    return _computed(name, args) or make("function", "Real", args, name)


def _inverse(value: float) -> float:
    return 1 / value


def _computed(name: str, args: tuple[Term, ...]) -> Term | None:
    """The function of a constant, rounded as a float is; None where it is no constant or has no value."""
    known: dict[str, Callable[..., float]] = {
        "sqrt": math.sqrt, "exp": math.exp, "tanh": math.tanh, "log": math.log, "pow": math.pow, "sin": math.sin, "cos": math.cos,
        "inverse": _inverse, "floor": math.floor, "ceil": math.ceil,
    }  # fmt: skip
    if name not in known or any(item.op != "const" for item in args):
        return None
    try:
        return number(known[name](*(float(item.data) for item in args)), "Real")
    except (ArithmeticError, ValueError):
        return None
