"""The softmax of a row of scores and what is summed with it: one term, with rows of nothing but minus infinity apart."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.magnitudes import are_small, is_below_all, is_small, rest_is_small
from onnx_attnfuse.certify.terms import (
    FALSE,
    NAN,
    NINF,
    TRUE,
    Number,
    Term,
    bind,
    disjoin,
    free,
    fresh,
    from_polynomial,
    is_constants,
    ite,
    make,
    negate,
    number,
    polynomial,
    substitute,
    truth,
)
from onnx_attnfuse.thresholds import ABSORBS

Score = Callable[[Term], Term]


def is_minus_infinity(term: Term) -> Term:
    """Whether a score is minus infinity; what is read from masks and inputs may be, what activations hold is a number."""
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


def is_nan(term: Term) -> Term:
    """Whether an element is no number; what is read from an array is one."""
    if term.op == "ite":
        return ite(term.args[0], is_nan(term.args[1]), is_nan(term.args[2]))
    return TRUE if term is NAN else FALSE


def weight(score: Score, length: Term, place: Term, empty: Term = NAN, sink: Term | None = None) -> Term:
    """The weight of one key, of at least one.

    Args:
        score: The score of a key.
        length: The number of keys.
        place: The key.
        empty: The weight where all scores are minus infinity.
        sink: A score besides, without a value of its own.
    """
    bound = fresh(length)
    body = score(bound)
    unseen = is_minus_infinity(body)
    nothing = FALSE if sink is not None or unseen is FALSE else arithmetic.every(bound, unseen)
    lifted = _row_choice(bound, body)
    if lifted is not None:
        condition, then, other = lifted
        return ite(
            condition,
            weight(lambda item: substitute(then, {bound: item}), length, place, empty, sink),
            weight(lambda item: substitute(other, {bound: item}), length, place, empty, sink),
        )
    if sink is None:
        body = without_row(bound, body)
    others = () if sink is None else (sink,)
    return ite(nothing, empty, bind("softmax", bound, body, "Real", place, *others))


def _row_choice(bound: Term, body: Term) -> tuple[Term, Term, Term] | None:
    """A choice of scores by something that holds for a whole row; None if the outermost is none."""
    if body.op == "ite" and bound not in free(body.args[0]):
        condition, then, other = body.args
        return condition, then, other
    return None


def without_row(bound: Term, body: Term) -> Term:
    """A score without what is added to all scores of its row, but for numbers that mask: in floats these leave nothing of it."""
    if body.sort != "Real" or body.op != "poly":
        return body
    kept = {
        atoms: factor
        for atoms, factor in polynomial(body).items()
        if not are_small(atoms, factor) or any(bound in free(atom) for atom in atoms)
    }
    return from_polynomial(kept, "Real")


def gathered(term: Term) -> Term:
    """A sum of exponentials times values over the sum of the exponentials, as values weighed by a softmax."""
    if term.op == "ite":
        return ite(term.args[0], gathered(term.args[1]), gathered(term.args[2]))
    if term.sort != "Real":
        return term
    parts: dict[tuple[Term, ...], Number] = {}
    for atoms, factor in polynomial(term).items():
        key = _over_exponentials(atoms)
        parts[key] = parts.get(key, 0) + factor
    return from_polynomial(parts, "Real")


def _over_exponentials(atoms: tuple[Term, ...]) -> tuple[Term, ...]:
    for below in atoms:
        if below.op != "function" or below.data != "inverse" or below.args[0].op != "sum":
            continue
        exponential = below.args[0].args[1]
        if exponential.op != "function" or exponential.data != "exp" or not _is_shifted(exponential.args[0]):
            continue
        for above in atoms:
            weighed = _weighed(above, exponential, below.args[0].args[0])
            if weighed is not None:
                rest = list(atoms)
                rest.remove(below)
                rest.remove(above)
                return tuple(sorted([*rest, weighed]))
    return atoms


def _is_shifted(term: Term) -> bool:
    """Whether the largest of a row is subtracted, so that no exponential overflows."""
    if term.op == "ite":
        return all(map(_is_shifted, term.args[1:]))
    return any(len(atoms) == 1 and atoms[0].op == "max" and factor == -1 for atoms, factor in polynomial(term).items())


def _weighed(above: Term, exponential: Term, bound: Term) -> Term | None:
    """A sum with the exponential of its index as a factor throughout, with a softmax in its place."""
    if above.op != "sum" or above.args[0].args[0] is not bound.args[0]:
        return None
    key = fresh(bound.args[0])
    body, factor = substitute(above.args[1], {above.args[0]: key}), substitute(exponential, {bound: key})
    share = bind("softmax", key, without_row(key, factor.args[0]), "Real", key)
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
