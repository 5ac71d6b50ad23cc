"""What masks a score: which keys take no part in a row, and what is left of a masked score."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.terms import FALSE, NINF, TRUE, Term, from_polynomial, ite, masklike, number, polynomial
from onnx_attnfuse.thresholds import ABSORBS, MASKS


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
    wild = masklike(term)
    large = {atoms: factor for atoms, factor in polynomial(term).items() if abs(factor) >= -MASKS or not wild_free(atoms, wild)}
    if not large:
        return FALSE
    return arithmetic.at_most(from_polynomial(large, "Real"), number(MASKS, "Real"))


def wild_free(atoms: tuple[Term, ...], wild: Sequence[Term]) -> bool:
    """Whether a product is of nothing that may mask."""
    return not any(atom is item for atom in atoms for item in wild)


def absorbed(term: Term) -> Term:
    """A score of which a number that was added leaves nothing, as that number."""
    if term.op == "ite":
        return ite(term.args[0], absorbed(term.args[1]), absorbed(term.args[2]))
    if term.op != "poly":
        return term
    lowest = polynomial(term).get((), 0)
    return number(lowest, "Real") if lowest <= ABSORBS else term


def snapped(term: Term, known: Sequence[Fraction], tolerance: float) -> Term:
    """The term with each real constant replaced by the one it is a rounding of."""
    from onnx_attnfuse.certify.terms import BINDERS, Number, bind, rebuilt

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
