"""Masking of scores: the keys that take no part in a row; and constants that are roundings of one number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.magnitudes import are_small
from onnx_attnfuse.certify.terms import FALSE, NINF, TRUE, Number, Term, from_polynomial, ite, number, polynomial
from onnx_attnfuse.thresholds import MASKS


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


def snapped(term: Term, known: Sequence[Fraction], tolerance: float) -> Term:
    """The term with each real constant replaced by the one it is a rounding of."""
    from onnx_attnfuse.certify.terms import BINDERS, bind, rebuilt

    done: dict[Term, Term] = {}

    def nearest(value: Number) -> Number:
        for item in known:
            if item != value and abs(item - value) <= tolerance * abs(item):
                return item
        return value

    def walk(item: Term) -> Term:
        found = done.get(item)
        if found is not None:
            return found
        args = tuple(map(walk, item.args))
        if item.op == "const" and item.sort == "Real":
            found = number(nearest(item.data), "Real")
        elif item.op == "poly" and item.sort == "Real":
            parts: dict[tuple[Term, ...], Number] = {}
            for atoms, factor in polynomial(item).items():
                key = tuple(sorted(map(walk, atoms)))
                parts[key] = parts.get(key, 0) + nearest(factor)
            found = from_polynomial(parts, "Real")
        elif args == item.args:
            found = item
        elif item.op in BINDERS:
            found = bind(item.op, args[0], args[1], item.sort, *args[2:], data=item.data)
        else:
            found = rebuilt(item, args)
        done[item] = found
        return found

    return walk(term)


def real_factors(term: Term) -> list[Fraction]:
    """The real constants in a term, but for whole numbers."""
    from onnx_attnfuse.certify.terms import walk

    found: dict[Fraction, None] = {}
    for item in walk(term):
        if item.sort == "Real" and item.op in {"const", "poly"}:
            found.update((Fraction(factor), None) for factor in polynomial(item).values() if factor not in {0, 1, -1})
    return list(found)
