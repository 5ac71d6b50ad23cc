"""Sums over an index, in a normal form."""

from __future__ import annotations

from fractions import Fraction

from onnx_attnfuse.certify.terms import (
    ONE,
    ZERO,
    Polynomial,
    Sort,
    Term,
    add,
    bind,
    free,
    from_polynomial,
    ite,
    multiply,
    number,
    polynomial,
    substitute,
    to_real,
)
from onnx_attnfuse.certify.weights import is_of_weights


def total(bound: Term, body: Term) -> Term:
    """The sum over an index; factors that do not depend on it are in front, and choices that do not are around."""
    if body.op in {"nan", "ninf"}:
        return body
    sort: Sort = body.sort
    parts = polynomial(body)
    for atom in sorted({atom for atoms in parts for atom in atoms if atom.op == "ite" and bound not in free(atom.args[0])}):
        return ite(atom.args[0], *(total(bound, substitute(body, {atom: part})) for part in atom.args[1:]))
    if not parts:
        return body
    if bound.args[0] is ONE:
        return substitute(body, {bound: ZERO})
    if len(parts) == 1:
        ((atoms, factor),) = parts.items()
        outside = tuple(atom for atom in atoms if bound not in free(atom))
        inside = tuple(atom for atom in atoms if bound in free(atom))
        front = from_polynomial({outside: factor}, sort)
        if len(inside) == 1 and _is_weight_of_key(inside[0], bound):
            return front
        if not inside:
            return multiply(front, bound.args[0] if sort == "Int" else to_real(bound.args[0]))
        return multiply(front, bind("sum", bound, from_polynomial({inside: 1}, sort), sort))
    groups = _groups(bound, parts) if sort == "Real" else [parts]
    if len(groups) > 1:
        return add(*(total(bound, from_polynomial(group, sort)) for group in groups))
    found = bind("sum", bound, body, sort)
    named, parts = found.args[0], polynomial(found.args[1])
    lead = parts[min(parts, key=lambda atoms: [atom.digest for atom in atoms])]  # whatever the index was called
    if sort == "Real" and lead != 1:
        scaled = from_polynomial({atoms: Fraction(factor) / Fraction(lead) for atoms, factor in parts.items()}, sort)
        return multiply(number(lead, sort), bind("sum", named, scaled, sort))
    return found


def _groups(bound: Term, parts: Polynomial) -> list[Polynomial]:
    """Summands that are summed together: those made of weights, each that all keys of a row share, and all others."""
    weights: Polynomial = {atoms: factor for atoms, factor in parts.items() if all(map(is_of_weights, atoms))}
    shared = [{atoms: factor} for atoms, factor in parts.items() if _is_shared(atoms, bound)]
    alone = {atoms for group in (weights, *shared) for atoms in group}
    rest: Polynomial = {atoms: factor for atoms, factor in parts.items() if atoms not in alone}
    return [group for group in (weights, *shared, rest) if group]


def _is_shared(atoms: tuple[Term, ...], bound: Term) -> bool:
    """Whether a product is the weight of a key, times a factor that does not depend on the key."""
    inside = [atom for atom in atoms if bound in free(atom)]
    return len(inside) == 1 and _is_weight_of_key(inside[0], bound)


def _is_weight_of_key(atom: Term, bound: Term) -> bool:
    """Whether an element is the weight of a key in a softmax without a sink; over all keys these come to 1."""
    if atom.op != "softmax" or len(atom.args) != 3 or bound in free(atom.args[1]):
        return False
    return atom.args[2] is bound and atom.args[0].args[0] is bound.args[0]
